"""Checkpoint directories: which files hold what, and when a directory is complete."""
