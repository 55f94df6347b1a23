"""Tries a plan on a copy of the module, and compares with the unsplit copy."""
