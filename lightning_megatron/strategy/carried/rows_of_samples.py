"""State that a step keeps of each sample of a batch for the next one, cut as a trial cuts the batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh.batches import map_tensors
from lightning_megatron.mesh.draws.global_rows import Rows
from lightning_megatron.mesh.messages import objects
from lightning_megatron.strategy.loss.tables import Name, Table

_OFF = {torch.float64: 1e-8, torch.float32: 1e-3}  # relative, of rows that are computed among others
Dims = int | tuple[int, ...]
"""The dim of a tensor along which samples lie: 1 in the state ``[layers, batch, hidden]`` of torch's recurrent layers.
Of a tuple of tensors, such as an LSTM's, that of each.
"""


def sample_dims(parts: Sequence[Any], whole: Any) -> Dims | None:
    """The first dim along which what the parts of a batch leave is as long together as what the whole leaves.

    Args:
        parts: what each leaves.
        whole: what all of them leave at once.

    Returns:
        The dim; ``None`` where there is none.

    Example:
        [1, 2, 8] and [1, 2, 8] beside [1, 4, 8] give 1; two of [16, 8] beside [16, 8] give nothing.
    """
    if isinstance(whole, tuple) and whole:  # a list may be one that steps append to
        if not all(type(part) is type(whole) and len(part) == len(whole) for part in parts):
            return None
        found = [sample_dims(each[:-1], each[-1]) for each in zip(*parts, whole, strict=True)]
        dims = tuple(dim for dim in found if isinstance(dim, int))
        return dims if len(dims) == len(whole) else None
    if not all(isinstance(each, Tensor) and each.ndim == getattr(whole, "ndim", 0) for each in (whole, *parts)):
        return None
    for dim in range(whole.ndim):
        shapes = {(*each.shape[:dim], *each.shape[dim + 1 :]) for each in (whole, *parts)}
        if len(shapes) == 1 and sum(part.shape[dim] for part in parts) == whole.shape[dim]:
            return dim
    return None


def are_own_rows(parts: Sequence[Any], whole: Any, dims: Dims) -> bool:
    """Whether the rows that the parts of a batch leave are those that the whole leaves, but for rounding.

    Args:
        parts: what each leaves.
        whole: what all of them leave at once.
        dims: where the samples lie.
    """
    if not isinstance(dims, int):
        return all(are_own_rows(each[:-1], each[-1], dim) for *each, dim in zip(*parts, whole, dims, strict=True))
    together = torch.cat([part.detach() for part in parts], dims).to(whole)
    if not together.is_floating_point():
        return bool(torch.equal(together, whole))
    off = _OFF.get(whole.dtype, 5e-2)
    return bool(torch.allclose(together, whole.detach(), rtol=off, atol=off * float(whole.detach().abs().max())))


class RowsOfPieces:
    """Values with rows of samples, cut for the pieces of one trial.

    Args:
        values: name -> table, key, dims and the rows of all pieces.
        size: how many samples these are.
        places: the samples of each piece.

    Attributes:
        names: of the values.
    """

    def __init__(self, values: Mapping[Name, tuple[Table, Any, Dims, Any]], size: int, places: Sequence[slice]) -> None:
        self._values, self._size, self._places, self.names = list(values.values()), size, places, frozenset(values)

    @contextmanager
    def of(self, index: int) -> Iterator[None]:
        """While a piece runs, whose writes are undone by others afterwards."""
        for table, key, dims, value in self._values:
            table.values[key] = self._taken(value, dims, self._places[index])
        yield

    def _taken(self, value: Any, dims: Dims, place: slice) -> Any:
        if not isinstance(dims, int):
            return type(value)(self._taken(each, dim, place) for each, dim in zip(value, dims, strict=True))
        each = value.shape[dims] // self._size
        return value.narrow(dims, place.start * each, (place.stop - place.start) * each)


NOTHING_KEPT = RowsOfPieces({}, 1, ())


class KeptRows:
    """State of each sample that a step keeps for the next step, such as a hidden state, as far as trials have seen.

    In a trial it is cut as the batch is. Where a later step reads it sample by sample, as one process does with all
    samples, a part of a batch has by itself the loss that it has in the whole; where all are brought together, which
    over replicas is a mean of a replica's own, it has not::

        h + self.last                  sample 5 of a batch finds what sample 5 of the batch before has left
        h + self.last.mean(0)          every sample finds something of all others

    Rows that are made of those of other samples (``self.last = h.mean(0).expand_as(h)``) are no state of each: a trial
    in which each part had its own rows finds others in the whole, and they are a number of the batch from then on.

    Attributes:
        places: name of a value -> its table and key, and where in it the samples lie.
        mixed: names of values that have a row for each sample, made of other samples too.
    """

    def __init__(self) -> None:
        self.places: dict[Name, tuple[Table, Any, Dims]] = {}
        self.mixed = set[Name]()

    def note_mixed(self, names: Iterable[Name]) -> None:
        """Take note of values whose rows are made of other samples too: they are cut no more."""
        for name in names:
            self.mixed.add(name)
            self.places.pop(name, None)

    def learn(self, found: Mapping[Name, tuple[Table, Any, Dims]]) -> None:
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
        values = {name: table.values.get(key) for name, (table, key, _) in self.places.items()}
        dims = {name: where for name, (*_, where) in self.places.items()}
        fit = {name: value for name, value in values.items() if _has_rows(value, dims[name], size)}
        if borrowed is not None:
            told = objects.gather(
                {n: map_tensors(value, lambda x: x.detach().cpu()) for n, value in fit.items()}, group
            )
            both = {name: [each.get(name) for each in told[borrowed : borrowed + 2]] for name in fit}
            joined = {name: _joined(held, dims[name], fit[name]) for name, held in both.items()}
            fit = {name: value for name, value in joined.items() if value is not None}
            size, first = rows[0].total, 0
        places = [slice(first + piece.first, first + piece.first + piece.size) for piece in rows]
        return RowsOfPieces({name: (*self.places[name], value) for name, value in fit.items()}, size, places)


def _has_rows(value: Any, dims: Dims, size: int) -> bool:
    if not isinstance(dims, int):
        fits = isinstance(value, tuple) and len(value) == len(dims)
        return fits and all(_has_rows(each, dim, size) for each, dim in zip(value, dims, strict=True))
    if type(value) is not Tensor or value.ndim <= dims or size == 0:
        return False
    return value.shape[dims] > 0 and value.shape[dims] % size == 0


def _joined(rows: Sequence[Any], dims: Dims, like: Any) -> Any:
    """The rows of two replicas; ``None`` where they are not alike but for their numbers."""
    if not isinstance(dims, int):
        if not all(isinstance(row, tuple) and len(row) == len(dims) for row in rows):
            return None
        found = [_joined(each[:-1], dim, each[-1]) for *each, dim in zip(*rows, like, dims, strict=True)]
        return None if any(each is None for each in found) else type(like)(found)
    shapes = {(*row.shape[:dims], *row.shape[dims + 1 :]) for row in rows if isinstance(row, Tensor)}
    alike = len(shapes) == 1 and all(isinstance(row, Tensor) for row in rows)
    return torch.cat(list(rows), dims).to(like) if alike else None
