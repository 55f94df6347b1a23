"""Batches are cut alike, step after step, or stay whole."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.mesh.batches import split_batch
from lightning_megatron.strategy.data.alike_batches import AlikeBatches


def _of(*lengths: int) -> list[Tensor]:
    return [torch.zeros(length) for length in lengths]


def test_a_shorter_batch_is_cut_like_those_before_it() -> None:
    known = AlikeBatches()
    for size in (8, 3):
        assert known.include({"x": torch.zeros(size, 2), "w": torch.zeros(5), "beside": _of(2, 4)}, size)
    assert known.include(torch.zeros(4), 4)


def test_loaders_that_run_out_at_different_times_are_noticed() -> None:
    known = AlikeBatches()
    assert known.include({"a": torch.zeros(8), "b": torch.zeros(8)}, 8)
    assert not known.include({"a": torch.zeros(4), "b": torch.zeros(8)}, 4)


def test_lists_of_one_tensor_per_sample_are_cut_where_all_are_of_one_length_by_chance() -> None:
    parts = split_batch({"x": torch.zeros(4, 2), "words": _of(3, 3, 3, 3), "pair": _of(4, 4)}, 2)
    assert [(len(part["x"]), [len(each) for each in part["words"]]) for part in parts] == [(2, [3, 3]), (2, [3, 3])]
    assert [[len(each) for each in part["pair"]] for part in parts] == [[2, 2], [2, 2]]


def test_lists_of_samples_that_are_not_told_from_columns_any_more_stay_whole() -> None:
    known = AlikeBatches()
    assert known.include({"x": torch.zeros(3, 2), "words": _of(2, 5, 4)}, 3)
    assert known.include({"x": torch.zeros(3, 2), "words": _of(2, 2, 2)}, 3)
    assert not known.include({"x": torch.zeros(3, 2), "words": _of(3, 3, 3)}, 3)
    alone = AlikeBatches()
    assert alone.include((_of(2, 5, 4), _of(2, 5, 4)), 3)
    assert not alone.include((_of(5, 5, 5), _of(5, 5, 5)), 5)
