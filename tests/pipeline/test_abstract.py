"""A forward that is run for its shapes leaves nothing behind."""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.pipeline.elsewhere.abstract import TensorShape, abstract_run


@functools.lru_cache
def bounded(size: int) -> Tensor:
    return torch.ones(size)


@functools.lru_cache(maxsize=None)  # noqa: UP033 - the other kind of cache
def unbounded(size: int) -> tuple[Tensor, Tensor]:
    return torch.ones(size), torch.zeros(size)


TABLE: dict[str, Tensor] = {}


class Hoarder(nn.Module):
    """Remembers tensors in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.seen: dict[str, Tensor] = {}
        self.list: list[Tensor] = []
        self.latest: Tensor | None = None
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.seen["x"] = self.latest = self.new = x + 1
        self.list.append(x)
        self.count = self.count + 1
        TABLE.setdefault("y", torch.ones(2))
        return {"y": self.linear(x) * bounded(3) + unbounded(3)[1], "n": 5}


def test_an_abstract_run_finds_shapes_and_leaves_no_trace() -> None:
    module = Hoarder()
    (number, shape), _ = sorted_leaves(*abstract_run(module, module.forward, (torch.ones(2, 3),), {}))
    assert number == 5 and isinstance(shape, TensorShape) and shape.shape == (2, 3)
    assert (module.seen, module.list, module.latest, TABLE) == ({}, [], None, {})
    assert not hasattr(module, "new") and float(module.count) == 0
    assert bounded.cache_info().currsize == 0 and unbounded.cache_info().currsize == 0


def test_caches_of_frozen_objects_are_cleared_too() -> None:
    before = gc.get_freeze_count()
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        abstract_run(Hoarder(), Hoarder().forward, (torch.ones(2, 3),), {})
        assert bounded.cache_info().currsize == 0 and gc.get_freeze_count() >= frozen
    finally:
        if not before:
            gc.unfreeze()


def sorted_leaves(leaves: list[Any], spec: Any) -> tuple[list[Any], Any]:
    return sorted(leaves, key=lambda leaf: isinstance(leaf, TensorShape)), spec


class ByContent(nn.Module):
    """Its shape depends on numbers, so that fake tensors will not do."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x[x >= 0]
        return self.kept.repeat(int(x.sum()) + 2)


def test_where_shapes_depend_on_numbers_zeros_stand_in_and_leave_no_trace_either() -> None:
    module = ByContent()
    (shape,), spec = abstract_run(module, module.forward, (torch.zeros(3),), {})
    assert spec is None and shape.shape == (6,) and not hasattr(module, "kept")
