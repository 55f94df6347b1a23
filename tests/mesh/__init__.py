"""Ranks, groups, messages, parts of tensors, and who has failed."""
