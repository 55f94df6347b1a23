"""Any ``DataLoader`` goes on where a run stopped: same order, no sample twice, none left out.

A loader's order comes from random numbers drawn when its iterator is made and when its first batch is asked for. Both
states are noted at the start of every epoch. To resume, the iterator is made from the same states, the batches that
were consumed are passed over in the sampler, without loading them, and the generators are put where they were when the
checkpoint was saved::

    epoch starts   state A ─ make iterator ─ state B ─ order drawn ─ batch 0 ─ batch 1 ─ ... ─ checkpoint (state C)
    resumed        state A ─ make iterator ─ state B ─ order drawn ─ pass over ────────────── state C ─ next batch

What is counted is samples over all replicas, so another number of replicas continues at the same sample.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from torch.utils.data import DataLoader, IterableDataset

from lightning_megatron.rng import collect_rng_state, restore_rng_state

_CPU = torch.device("cpu")


class Continuation:
    """Where all loaders of a run go on.

    Args:
        epoch: the epoch to continue, for samplers that shuffle by it.
        random_state: of the global generators when the checkpoint was saved; ``None`` leaves them.
        device: whose generator is among them.
    """

    def __init__(self, epoch: int, random_state: dict[str, Any] | None, device: torch.device) -> None:
        self.epoch = epoch
        self._random_state = random_state
        self._device = device
        self.is_over = False

    def reach(self) -> None:
        """The first batch is about to be fetched: from here on random numbers are those of the interrupted run."""
        self.is_over = True
        self.rewind()

    def rewind(self) -> None:
        """Set the global generators to where the checkpoint was saved."""
        if self._random_state is not None:
            restore_rng_state(self._random_state, self._device)


@dataclass
class _Skip:
    """Batches to pass over in the epoch under way, and the states that its order came from."""

    batches: int
    made: dict[str, Any] | None
    drawn: dict[str, Any] | None


class ResumableLoader(DataLoader[Any]):
    """Mixed into the class of a loader by :func:`make_resumable`; not to be constructed."""

    resume_made: dict[str, Any] | None
    resume_drawn: dict[str, Any] | None
    resume_skip: _Skip | None
    resume_at: Continuation | None
    resume_passing: int

    def __iter__(self) -> Any:
        skip, at = self.resume_skip, self.resume_at
        if at is None or at.is_over:
            self.resume_skip, skip = None, None
        else:
            _set_sampler_epoch(self, at.epoch)
            at.rewind()
        if skip is not None and skip.made is not None:
            restore_rng_state(skip.made, _CPU)
        self.resume_made = collect_rng_state(_CPU)
        count = skip.batches if skip is not None else 0
        loads = isinstance(self.dataset, IterableDataset)
        self.resume_passing = 0 if loads else count
        try:
            iterator = super().__iter__()
        finally:
            self.resume_passing = 0
        return _ResumedIterator(self, iterator, skip, count if loads else 0)

    @property
    def _index_sampler(self) -> Any:
        sampler = super()._index_sampler
        return _PassingOver(sampler, self.resume_passing) if self.resume_passing else sampler

    def state_dict(self) -> dict[str, Any]:
        """What says to Lightning that the loader can resume; its state is in the strategy's part of a checkpoint."""
        return {"resumes": True}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: see :func:`continue_loader`."""


class _PassingOver:
    """A sampler without its first entries, the first time it is gone through (persistent workers keep it)."""

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler = sampler
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        entries = iter(self._sampler)
        count, self._count = self._count, 0
        for _ in range(count):
            next(entries, None)
        yield from entries

    def __len__(self) -> int:
        return len(self._sampler)


class _ResumedIterator:
    """Notes the random state before the first batch, and continues a run there."""

    def __init__(self, loader: ResumableLoader, iterator: Any, skip: _Skip | None, load_and_drop: int) -> None:
        self._loader = loader
        self._iterator = iterator
        self._skip = skip
        self._drop = load_and_drop
        self._started = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)

    def __next__(self) -> Any:
        if not self._started:
            self._started = True
            return self._first()
        return next(self._iterator)

    def _first(self) -> Any:
        loader, at = self._loader, self._loader.resume_at
        continues = at is not None and not at.is_over
        if self._skip is None:
            if continues:
                assert at is not None
                at.reach()
            loader.resume_drawn = collect_rng_state(_CPU)
            return next(self._iterator)
        if self._skip.drawn is not None:
            restore_rng_state(self._skip.drawn, _CPU)
        loader.resume_drawn = collect_rng_state(_CPU)
        for _ in range(self._drop):
            next(self._iterator)
        if self._drop == 0:
            self._draw_order()
        if at is not None:
            at.reach()
        return next(self._iterator)

    def _draw_order(self) -> None:
        """Let a lazy sampler draw its order now, before the generators are put where the checkpoint was saved."""
        entries = getattr(self._iterator, "_sampler_iter", None)
        if entries is None or bool(getattr(self._iterator, "_num_workers", 0)):
            return
        first = next(entries, _END)
        if first is not _END:
            self._iterator._sampler_iter = _chain(first, entries)


_END = object()


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


@functools.cache
def _resumable_class(original: type) -> type:
    """One class per class of loader, so that equal loaders stay equal."""
    return type(original.__name__, (ResumableLoader, original), {"__module__": original.__module__})


def make_resumable(loader: Any) -> Any:
    """Let a ``DataLoader`` go on where a run stopped, in place; others, and those that can already, are left alone."""
    if not isinstance(loader, DataLoader) or isinstance(loader, ResumableLoader):
        return loader
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return loader
    loader.__class__ = _resumable_class(type(loader))  # type: ignore[arg-type]
    for name in ("made", "drawn", "skip", "at"):
        loader.__dict__[f"resume_{name}"] = None
    loader.__dict__["resume_passing"] = 0
    return loader


def batch_size_of(loader: Any) -> int | None:
    """Samples per batch of one replica, where the loader tells."""
    for holder in (getattr(loader, "batch_sampler", None), loader):
        size = getattr(holder, "batch_size", None)
        if isinstance(size, int):
            return size
    return None


def loader_state(loader: ResumableLoader) -> dict[str, Any]:
    """What :func:`continue_loader` needs besides the number of consumed batches."""
    return {"made": loader.resume_made, "drawn": loader.resume_drawn, "batch_size": batch_size_of(loader)}


def continue_loader(
    loader: ResumableLoader, batches: int, state: dict[str, Any] | None, continuation: Continuation
) -> None:
    """Let the next epoch that begins pass over ``batches`` batches, in the order that ``state`` tells."""
    made, drawn = (state["made"], state["drawn"]) if state is not None else (None, None)
    loader.__dict__["resume_skip"] = _Skip(batches, made, drawn) if batches else None
    loader.__dict__["resume_at"] = continuation
