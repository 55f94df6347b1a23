"""Gradient buckets, and how they are shared out."""
