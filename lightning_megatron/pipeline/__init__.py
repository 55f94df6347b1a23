"""A module cut at its layers, and the schedule that runs it."""
