"""Ranks, groups, messages, which part of a tensor is here, and who has failed."""
