"""Splits the experts of a mixture over ranks, for modules that know nothing of it."""
