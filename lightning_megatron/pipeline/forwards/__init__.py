"""Wrappers of a layer's ``forward``: recomputation, compilation, split backwards and 8-bit products."""
