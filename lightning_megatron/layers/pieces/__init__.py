"""Chunked loss: the loss computes the logits of a few tokens at a time, so that they are never materialized."""
