"""One pipeline stage: the user's step run on this rank's part of the module."""
