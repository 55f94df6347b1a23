"""Drawings of timelines: text, SVG, PNG, and traces for a browser."""
