"""A plan tried on a copy against the unsplit module."""
