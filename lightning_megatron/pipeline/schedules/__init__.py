"""Schedules as data: one file per family, what they are built of, and what checks and simulates them."""
