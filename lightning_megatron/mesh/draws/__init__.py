"""Random numbers from counters over global indices, which are those of one process in any layout."""
