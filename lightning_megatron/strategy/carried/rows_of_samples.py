"""State that a step keeps of each sample of a batch for the next one, cut as a trial cuts the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh.draws.global_rows import Rows
from lightning_megatron.mesh.messages import objects
from lightning_megatron.strategy.loss.tables import Name, Table


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


class KeptRows:
    """State of each sample that a step keeps for the next step, such as a hidden state, as far as trials have seen.

    In a trial it is cut as the batch is. Where a later step reads it sample by sample, as one process does with all
    samples, a part of a batch has by itself the loss that it has in the whole; where all are brought together, which
    over replicas is a mean of a replica's own, it has not::

        h + self.last                  sample 5 of a batch finds what sample 5 of the batch before has left
        h + self.last.mean(0)          every sample finds something of all others

    Attributes:
        places: name of a value -> its table and key.
    """

    def __init__(self) -> None:
        self.places: dict[Name, tuple[Table, Any]] = {}

    def learn(self, found: Mapping[Name, tuple[Table, Any]]) -> None:
        """Take note of values that have a row for each sample."""
        self.places |= found

    def of(
        self, rows: Sequence[Rows], size: int, first: int, group: dist.ProcessGroup, borrowed: int | None
    ) -> RowsOfPieces:
        """Them, to be cut for the pieces of a trial. Collective over the replicas, where it is of two.

        Args:
            rows: the samples of each piece, among those of all pieces.
            size: samples of this replica's batch.
            first: number of the first sample of the pieces among these.
            group: the replicas.
            borrowed: the first of two neighbours among them whose batches the pieces are; ``None`` for this one's.
        """
        values = {name: table.values.get(key) for name, (table, key) in self.places.items()}
        fit = {name: value for name, value in values.items() if isinstance(value, Tensor) and _has_rows(value, size)}
        if borrowed is not None:
            told = objects.gather({name: value.detach().cpu() for name, value in fit.items()}, group)
            both = {name: [each.get(name) for each in told[borrowed : borrowed + 2]] for name in fit}
            fit = {name: torch.cat(rows).to(fit[name]) for name, rows in both.items() if _are_alike(rows)}
            size, first = rows[0].total, 0
        places = [slice(first + piece.first, first + piece.first + piece.size) for piece in rows]
        return RowsOfPieces({name: (*self.places[name], value) for name, value in fit.items()}, size, places)


def _has_rows(value: Tensor, size: int) -> bool:
    return type(value) is Tensor and value.ndim > 0 and size > 0 and len(value) > 0 and len(value) % size == 0


def _are_alike(rows: Sequence[Any]) -> bool:
    return all(isinstance(row, Tensor) for row in rows) and len({row.shape[1:] for row in rows}) == 1
