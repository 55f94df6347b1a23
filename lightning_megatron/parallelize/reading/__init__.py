"""What a module is, read in execution order on a copy."""
