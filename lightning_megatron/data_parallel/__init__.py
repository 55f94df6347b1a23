"""Sums gradients over replicas, and shards the optimizer's update over them (ZeRO)."""
