"""What runs at the coordinator: rounds, selective aggregation, the guard and checkpoints."""
