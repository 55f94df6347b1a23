"""Describes the parts of logical tensors that a rank holds, parts of a module by name, and packages of code."""
