"""Splits the tokens of every sequence over ranks, without changes to the module."""
