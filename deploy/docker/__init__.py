"""What the one-shot services of docker-compose.yml run."""
