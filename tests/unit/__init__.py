"""Tests of one module at a time, in one process."""
