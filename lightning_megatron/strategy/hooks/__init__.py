"""User hooks, and what they see of a divided module."""
