"""User hooks, and what they see of a divided module; and what of the code of steps changes with time."""
