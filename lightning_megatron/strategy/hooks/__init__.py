"""Hooks of the user, and what they see of a module that is divided."""
