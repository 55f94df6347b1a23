"""Numbers that a batch brings beside its samples, and that count them: a replica's, where one process has all.

A collator may count what a loss is divided by, before the batch is cut::

    def collate(samples):   {..., "num": (labels != -100).sum()}      replica 0: 30   replica 1: 50   one process: 80
    loss = F.cross_entropy(..., reduction="sum") / batch["num"]

A part of a batch has the number of all of it, so its loss is found to be a sum. Those of the replicas add up as well,
if each divides by what all of them count together.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_megatron.mesh.batches import batch_size_of
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import raw_all_gather
from lightning_megatron.strategy.loss.counted import candidates

Path = tuple[Any, ...]
"""Keys, places and fields that lead to a value in a batch."""


class NumbersOfAll:
    """Adds up over the replicas what batches bring as numbers of their own samples or targets.

    Args:
        group: the replicas; ``None`` where batches are taken as they are.
        device: where messages are sent from.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self._paths: list[Path] | None = None if group is not None else []
        self._totals: dict[Path, float] = {}
        self._said = False

    def look(self, batch: Any, parts: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Find those of a batch, and give what trials are to see; collective over the replicas where the first batches
        had any.

        Args:
            batch: of this replica, the whole.
            parts: its micro-batches.
        """
        if self._group is not None and self._paths != []:
            self._look(batch, self._group)
        return self.into([batch])[0], self.into(parts)

    def _look(self, batch: Any, group: dist.ProcessGroup) -> None:
        mine = own_counts(batch)
        if self._paths is None:
            told = objects.gather(sorted(mine, key=repr), group)
            self._paths = [path for path in told[0] if all(path in each for each in told[1:])]
        row = torch.tensor([[mine.get(path, math.nan) for path in self._paths]], dtype=torch.float64)
        sums = raw_all_gather(row.to(self._device), 0, group).sum(0).tolist() if self._paths else []
        self._totals = {path: total for path, total in zip(self._paths, sums, strict=True) if not math.isnan(total)}
        self._paths = list(self._totals)  # others have been equal by chance

    def into(self, batches: Sequence[Any]) -> list[Any]:
        """Batches with the numbers of all replicas in the place of their own.

        Args:
            batches: the latest that was looked at, or its micro-batches.
        """
        return [_with(batch, self._totals) for batch in batches] if self._totals else list(batches)

    def used(self, batches: Sequence[Any]) -> list[Any]:
        """The same, for a step; says so once."""
        if self._totals and not self._said:
            names = ", ".join("`" + "".join(f"[{key!r}]" for key in path) + "`" for path in self._totals)
            rank_zero_info(f"the loss is divided by a number of the batch ({names}): that of all replicas, added up.")
            self._said = True
        return self.into(batches)


def own_counts(batch: Any) -> dict[Path, float]:
    """Numbers beside the samples of a batch that are how many of them, or of their targets, there are.

    Args:
        batch: of this replica, the whole.

    Example:
        A batch of 4 samples, 17 targets that are not -100, and ``{"num": 17, "step": 3}`` gives ``{("num",): 17.0}``.
    """
    numbers = {path: number for path, number in _numbers(batch, ()) if number > 1}
    if not numbers:
        return {}
    try:
        counts = {float(batch_size_of(batch)), *(way(batch) for way in candidates(batch) if way.ignored is not None)}
    except ValueError:
        return {}
    return {path: number for path, number in numbers.items() if number in counts}


def _numbers(value: Any, path: Path) -> Iterator[tuple[Path, float]]:
    if isinstance(value, Tensor):
        if not value.ndim and not value.is_complex() and value.dtype != torch.bool:
            yield path, float(value)
    elif type(value) in (int, float):
        yield path, float(value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _numbers(each, (*path, key))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _numbers(getattr(value, field.name), (*path, field.name))
    elif isinstance(value, (list, tuple)) and any(isinstance(each, (Tensor, Mapping, list, tuple)) for each in value):
        for place, each in enumerate(value):  # and not the numbers of a list, of which each is a sample's
            yield from _numbers(each, (*path, place))


def _with(batch: Any, numbers: Mapping[Path, float]) -> Any:
    for path, number in numbers.items():
        batch = _put(batch, path, number)
    return batch


def _put(value: Any, path: Path, number: float) -> Any:
    """A nest with another number in one place; nothing of the given one is written to."""
    if not path:
        return torch.full_like(value, number) if isinstance(value, Tensor) else type(value)(number)
    key, *rest = path
    if isinstance(value, (list, tuple)):
        items = [_put(each, tuple(rest), number) if place == key else each for place, each in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if not isinstance(value, Mapping):
        return dataclasses.replace(value, **{key: _put(getattr(value, key), tuple(rest), number)})
    found: Any = copy.copy(value) if isinstance(value, MutableMapping) else dict(value)
    found[key] = _put(value[key], tuple(rest), number)
    return found
