"""Rows of tokens sent to the ranks that hold their experts, and back."""
