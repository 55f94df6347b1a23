"""Logits that are never whole: a head's rows, multiplied in pieces of tokens by the loss that asks for them."""
