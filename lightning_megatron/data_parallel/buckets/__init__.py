"""Gradient buckets: their layout, their sharding over replicas and their reductions."""
