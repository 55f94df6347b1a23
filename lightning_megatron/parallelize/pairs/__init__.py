"""Pairs of column- and row-parallel layers: found, proposed, chosen."""
