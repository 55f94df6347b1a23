"""Values that the user logs inside a step, made equal on every rank."""
