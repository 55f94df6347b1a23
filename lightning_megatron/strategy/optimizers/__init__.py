"""State of optimizers in the user's code: written by steps, and seen whole by hooks."""
