"""Shards the layers' weights over the replicas, and gathers them only while a layer runs (ZeRO-3)."""
