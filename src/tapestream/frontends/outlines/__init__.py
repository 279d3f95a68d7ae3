"""What a training step takes, found on shapes alone: nothing is allocated or computed."""
