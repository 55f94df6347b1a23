"""How torch functions run on tensors of which each rank holds some of the tokens."""
