"""Values that a step keeps of each sample for the next step, such as a hidden state: cut as the batch is in a trial.

A later step may read them sample by sample, which is what one process does with all samples, or bring them together,
which over replicas is a mean of a replica's own::

    h + self.last                  sample 5 of a batch finds what sample 5 of the batch before has left
    h + self.last.mean(0)          every sample finds something of all others

A part of a batch by itself, with the values of its samples, tells which: only the first gives it the loss that it has
in the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh.draws.global_rows import Rows
from lightning_megatron.mesh.messages import objects
from lightning_megatron.strategy.loss.tables import Name, Table


class KeptRows:
    """What a step keeps of its samples, as far as trials have seen.

    Attributes:
        places: name of a value -> its table and key.
    """

    def __init__(self) -> None:
        self.places: dict[Name, tuple[Table, Any]] = {}

    def learn(self, found: Mapping[Name, tuple[Table, Any]]) -> None:
        """Take note of values that have a row for each sample."""
        self.places |= found

    def of(self, rows: Sequence[Rows], size: int, first: int, borrowed: dist.ProcessGroup | None) -> RowsOfPieces:
        """Them, to be cut for the pieces of a trial. Collective over ``borrowed``.

        Args:
            rows: the samples of each piece, among those of all pieces.
            size: samples of this replica's batch.
            first: number of the first sample of the pieces among these.
            borrowed: the replicas, if the pieces are the batches of the first two of them.
        """
        values = {name: table.values.get(key) for name, (table, key) in self.places.items()}
        fit = {name: value for name, value in values.items() if isinstance(value, Tensor) and _has_rows(value, size)}
        if borrowed is not None:
            told = objects.gather({name: value.detach().cpu() for name, value in fit.items()}, borrowed)[:2]
            both = {name: [each.get(name) for each in told] for name in fit}
            fit = {name: torch.cat(rows).to(fit[name]) for name, rows in both.items() if _are_alike(rows)}
            size, first = rows[0].total, 0
        places = [slice(first + piece.first, first + piece.first + piece.size) for piece in rows]
        return RowsOfPieces({name: (*self.places[name], value) for name, value in fit.items()}, size, places)


class RowsOfPieces:
    """Values with rows of samples, cut for the pieces of one trial.

    Args:
        values: name -> table, key and the rows of all pieces.
        size: how many samples these are.
        places: the samples of each piece.

    Attributes:
        names: of the values.
    """

    def __init__(self, values: Mapping[Name, tuple[Table, Any, Tensor]], size: int, places: Sequence[slice]) -> None:
        self._values, self._size, self._places, self.names = list(values.values()), size, places, frozenset(values)

    @contextmanager
    def of(self, index: int) -> Iterator[None]:
        """While a piece runs, whose writes are undone by others afterwards."""
        for table, key, value in self._values:
            each, place = len(value) // self._size, self._places[index]
            table.values[key] = value[place.start * each : place.stop * each]
        yield


NOTHING_KEPT = RowsOfPieces({}, 1, ())


def _has_rows(value: Tensor, size: int) -> bool:
    return type(value) is Tensor and value.ndim > 0 and size > 0 and len(value) > 0 and len(value) % size == 0


def _are_alike(rows: Sequence[Any]) -> bool:
    return all(isinstance(row, Tensor) for row in rows) and len({row.shape[1:] for row in _tensors(rows)}) == 1


def _tensors(rows: Iterable[Any]) -> Iterator[Tensor]:
    return (row for row in rows if isinstance(row, Tensor))
