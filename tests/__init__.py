"""Tests of lightning_megatron; a package so that worker processes can import test functions by name."""
