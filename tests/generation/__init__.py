"""Tests of generation: a model's own decoding loop on parts of a model."""
