"""Where a module is cut into stages, and which stage owns what."""
