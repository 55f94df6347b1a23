"""Repeated calls of the model within one step, as in generation: every stage gets the output."""
