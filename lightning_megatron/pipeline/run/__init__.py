"""The loop that runs a stage's instructions, and the links between stages."""
