"""Reads published runs, predicts them, and scores the predictions."""
