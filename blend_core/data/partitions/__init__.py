"""Partition rules (PROTOCOL 3): pure functions of ordered labels, parameters and a seed."""
