"""Styles and patterns of tensor-parallel plans, and the plans that models define themselves."""
