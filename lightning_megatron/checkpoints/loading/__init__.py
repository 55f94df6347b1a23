"""Reads the weights of a checkpoint into a module: pretrained ones, and those of adapters."""
