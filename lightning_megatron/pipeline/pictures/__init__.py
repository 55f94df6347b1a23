"""Timelines drawn: text, SVG, PNG, and traces for a browser."""
