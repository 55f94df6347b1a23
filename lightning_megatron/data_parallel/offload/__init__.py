"""Keeps the optimizer's weights and state in host memory or in files, and updates them there."""
