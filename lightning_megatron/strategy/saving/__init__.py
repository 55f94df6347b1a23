"""Checkpoints, resuming and stopping, as Lightning asks for them."""
