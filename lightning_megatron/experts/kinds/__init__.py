"""The ways in which modules implement experts: how each is run on exchanged tokens, and tested on a copy first."""
