"""Cuts a module into stages: finds its trunk, balances the layers, and places all other parts."""
