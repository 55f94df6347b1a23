"""Pairs of column- and row-parallel layers: how they are found, which cuts are proposed, and which is chosen."""
