"""Inputs of a prediction: model shapes, clusters, recipes and calibrated constants."""
