"""Activations kept for the backward: offloaded to host memory, recomputed, or computed for a few tokens at a time."""
