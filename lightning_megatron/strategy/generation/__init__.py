"""Evaluation steps that call the model repeatedly, as text generation does."""
