"""Collectives, messages between ranks, and Python values sent over them."""
