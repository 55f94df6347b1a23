"""Steps the user's optimizer on this rank's shard of the weights."""
