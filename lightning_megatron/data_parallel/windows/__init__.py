"""Weights of layers, spread over the replicas and put together only while a layer needs them (ZeRO-3)."""
