"""Tells what a rank waits for, and which rank has failed."""
