"""Callbacks that use measurements of this strategy: gradient norm, layer times, pipeline timelines."""
