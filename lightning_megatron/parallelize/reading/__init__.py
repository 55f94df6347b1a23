"""Reads a module: its kinds of layers, and their execution order in a trial run of a copy."""
