"""Memory of a rank: measured and predicted, by kind, with suggestions when it runs out."""
