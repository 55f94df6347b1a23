"""Checkpoint directories: what is written by whom, in which files, and when a directory counts as whole."""
