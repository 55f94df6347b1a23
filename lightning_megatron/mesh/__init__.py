"""The grid of ranks: process groups, messages between ranks, slices of tensors, and failed or hanging ranks."""
