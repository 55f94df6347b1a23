"""Gradients summed and optimizers stepped by replicas."""
