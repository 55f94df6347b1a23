"""Where the time and memory of one step go."""
