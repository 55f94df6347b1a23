"""What a rank waits for, and which rank has failed."""
