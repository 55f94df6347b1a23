"""What layers keep for the backward: in host memory, computed again, or by pieces of the tokens."""
