"""Models the time and memory of one training step."""
