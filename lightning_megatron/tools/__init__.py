"""The command line, and rehearsals of one rank of a launch."""
