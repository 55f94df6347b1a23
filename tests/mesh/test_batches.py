"""Batches are cut alike, step after step, or stay whole."""

from __future__ import annotations

import torch

from lightning_megatron.mesh.batches import is_alike


def test_a_shorter_batch_is_cut_like_those_before_it() -> None:
    known: dict[int, int] = {}
    for size in (8, 3):
        assert is_alike(
            {"x": torch.zeros(size, 2), "w": torch.zeros(5), "ragged": [torch.zeros(2), torch.zeros(3)]}, size, known
        )
    assert is_alike(torch.zeros(4), 4, known)
    assert known == {2: 1, 1: 0}


def test_loaders_that_run_out_at_different_times_are_noticed() -> None:
    known: dict[int, int] = {}
    assert is_alike({"a": torch.zeros(8), "b": torch.zeros(8)}, 8, known)
    assert not is_alike({"a": torch.zeros(4), "b": torch.zeros(8)}, 4, known)
