"""Whether the loss of a batch is made of the losses of its micro-batches, found out by trying."""
