"""Calls of the model again and again, as generation makes them: every stage gets what it gives."""
