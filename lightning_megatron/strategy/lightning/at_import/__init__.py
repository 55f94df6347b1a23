"""What Lightning is taught when it is imported, and how it forgets it."""
