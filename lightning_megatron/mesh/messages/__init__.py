"""Collectives, point-to-point messages, and Python values sent between ranks."""
