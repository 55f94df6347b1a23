"""Lightning plugins of the strategy."""
