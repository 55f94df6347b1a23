"""Describes the parts of logical tensors that a rank holds, and the parts of a module by name."""
