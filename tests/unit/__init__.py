"""What holds for the package as a whole: its structure, and its documentation."""
