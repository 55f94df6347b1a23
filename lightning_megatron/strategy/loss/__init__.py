"""Finds out by a trial whether the loss of a batch is the mean or sum of the losses of its micro-batches."""
