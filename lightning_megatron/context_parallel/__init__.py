"""Splits the tokens of every sequence over ranks, for modules that know nothing of it."""
