"""Searches the layouts that fit a cluster, ranks them by speed, and explains the ranking."""
