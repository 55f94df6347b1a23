"""Which layers are split how, and that splitting changes no number."""
