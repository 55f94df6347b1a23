"""Balancing losses of mixtures of experts in a step: tried, and made those of the whole batch in micro-batches."""
