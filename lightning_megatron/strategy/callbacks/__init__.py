"""Callbacks for what only this strategy can tell."""
