"""Modules and optimizers under logical names and shapes."""
