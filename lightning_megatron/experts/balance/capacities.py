"""Capacities of the users' own mixtures, lowered while a step is tried.

A fixed capacity may let every token of two parts of a batch pass, and drop some of the whole batch. A trial with what
the module says shows nothing, and another is made in which the experts are full at once::

    expert_capacity = 64      tokens of a sequence: full in each sequence by itself, no samples are mixed
                  ──▶ 1       tokens of a batch: what the first sample fills is missing to the second
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_megatron.experts.routers import Mixture
from lightning_megatron.layers import MoE

_FACTOR = 0.5  # half of the tokens find no place


@dataclass(frozen=True)
class _Capacity:
    """An attribute that says how many tokens an expert takes.

    Attributes:
        module: that has it.
        name: of it.
        low: a value at which experts are soon full.
    """

    module: nn.Module
    name: str
    low: Any


class Capacities:
    """The attributes by which modules with a router limit the tokens of an expert.

    Args:
        mixtures: those that are looked at.
    """

    def __init__(self, mixtures: Iterable[Mixture]) -> None:
        self._known: list[_Capacity] = []
        seen = set[nn.Module]()
        for mixture in mixtures:
            inside = set(mixture.experts.modules())
            for child in mixture.block.modules():
                if child not in inside and child not in seen and not isinstance(child, MoE):
                    seen.add(child)
                    self._known += _of(child, mixture.count)

    @property
    def some(self) -> bool:
        """Whether there are any on this rank."""
        return bool(self._known)

    @contextmanager
    def lowered(self) -> Iterator[None]:
        """A context in which experts are full after few tokens."""
        before = [getattr(each.module, each.name) for each in self._known]
        for each in self._known:
            setattr(each.module, each.name, each.low)
        try:
            yield
        finally:
            for each, value in zip(self._known, before, strict=True):
                setattr(each.module, each.name, value)


def _of(module: nn.Module, experts: int) -> Iterator[_Capacity]:
    """Numbers of tokens, or factors of their mean, that are called capacities; but those that no batch reaches."""
    for name, value in module.__dict__.items():
        if "capacity" not in name.lower() or isinstance(value, bool):
            continue
        if isinstance(value, int) and value > 1:
            yield _Capacity(module, name, 1)
        elif isinstance(value, float) and _FACTOR < value < experts:
            yield _Capacity(module, name, _FACTOR)
