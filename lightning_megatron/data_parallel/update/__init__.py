"""The user's optimizer stepping on this rank's share of the weights."""
