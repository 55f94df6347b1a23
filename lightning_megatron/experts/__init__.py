"""Splits the experts of a mixture over ranks, without changes to the module."""
