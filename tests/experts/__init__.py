"""Experts shared out over replicas."""
