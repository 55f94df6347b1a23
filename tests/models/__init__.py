"""The reference decoder."""
