"""What a run will cost, in one process."""
