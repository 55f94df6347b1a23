"""Files, names and states: what is saved, read, and survives."""
