"""Parity against one process: the definition of correct here."""
