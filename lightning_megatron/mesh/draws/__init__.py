"""Counter-based random numbers, indexed globally, so that every layout draws the numbers of one process."""
