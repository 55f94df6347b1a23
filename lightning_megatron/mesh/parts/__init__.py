"""Describes parts of logical tensors, parts of a module by name, and packages of code; notes values by tensor."""
