"""Balance of experts: losses, biases and capacities of the whole batch, and the load that is counted."""
