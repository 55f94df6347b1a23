"""From a whole module to this rank's part of it: divided, moved, and equal on all ranks that hold the same."""
