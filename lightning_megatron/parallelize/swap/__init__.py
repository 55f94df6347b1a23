"""Layers of the user's module replaced by their parallel twins."""
