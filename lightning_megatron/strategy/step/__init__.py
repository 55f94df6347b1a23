"""One step of training or evaluation, from a batch to its result."""
