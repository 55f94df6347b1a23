"""Notices batches of which other tensors would be cut than of those before: they had better stay whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lightning_megatron.mesh.batches import is_per_sample, is_ragged, parts_of, size_of_plain


class AlikeBatches:
    """Knowledge of the batches of a run.

    When two loaders are combined into one batch, one may yield a shorter last batch. Its tensors then no longer have
    the batch size of the other loader's, and would go unsplit to every micro-batch. The same happens to a tensor such
    as class weights if its length is the batch size by chance. A list with one tensor per sample is not told from a
    list of columns if all of its tensors are as long as there are samples, or if nothing else tells how many there are.
    """

    def __init__(self) -> None:
        self._uncut: dict[int, int] = {}
        self._had_lists = False

    def include(self, batch: Any, size: int) -> bool:
        """Whether as many tensors of a batch would be split as of the first one.

        Args:
            batch: the user's.
            size: its number of samples.
        """
        if size_of_plain(batch) == size:  # the usual one, in every step
            return not self._had_lists and self._uncut.setdefault(len(batch), 0) == 0
        lengths: list[int | None] = list(_lengths(batch, size))
        if None in lengths:
            self._had_lists = True
        elif self._had_lists:
            return False
        counted = [length for length in lengths if length is not None]
        uncut = len(counted) - counted.count(size)
        return self._uncut.setdefault(len(counted), uncut) == uncut


def _lengths(batch: Any, size: int) -> Iterator[int | None]:
    """Sizes of dimension 0 of the tensors of a batch; ``None`` for a list with one per sample."""
    if isinstance(batch, Tensor):
        if batch.ndim:
            yield batch.shape[0]
    elif is_per_sample(batch, size):
        yield None
    elif not is_ragged(batch):
        for part in parts_of(batch):
            yield from _lengths(part, size)
