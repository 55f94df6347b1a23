"""Patches of Lightning that are installed when it is imported, and how they are removed."""
