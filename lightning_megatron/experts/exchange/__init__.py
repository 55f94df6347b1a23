"""Sends tokens to the ranks that hold their experts, and the results back (all-to-all)."""
