"""Gradient buckets and global gradient norm."""
