"""How functions of torch run on tensors of which a rank holds some tokens."""
