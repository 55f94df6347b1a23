"""What is run, where, and how: shapes, clusters, recipes."""
