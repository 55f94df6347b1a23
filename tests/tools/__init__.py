"""The command line and the rehearsal."""
