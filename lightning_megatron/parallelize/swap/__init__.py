"""Replaces layers of the user's module by their parallel counterparts."""
