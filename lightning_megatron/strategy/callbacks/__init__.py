"""Callbacks that report what only this strategy knows."""
