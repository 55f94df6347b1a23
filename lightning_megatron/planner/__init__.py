"""Foresight: what a run will cost in time and memory, before it is started. Pure Python."""
