"""Layers that can be split, beside their whole counterparts."""
