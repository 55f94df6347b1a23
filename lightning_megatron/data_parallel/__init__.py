"""Gradients summed over replicas, and optimizers stepped on shares of the weights."""
