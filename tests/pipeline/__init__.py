"""Schedules, stages, and what crosses between them."""
