"""What is done beside a run: the command line, and one rank on paper."""
