"""Load balancing: losses, biases and capacities over the whole batch, and the measured load of each expert."""
