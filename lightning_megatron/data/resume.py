"""Any ``DataLoader`` goes on where a run stopped: same order, no sample twice, none left out.

A sampler draws the order of an epoch from the global generators (or from a seed and the epoch). Their state is noted
just before. To resume, the order is drawn from that state again, the batches that were consumed are passed over in the
sampler, without loading them, and the generators are put where they were when the checkpoint was saved::

    epoch starts   state A ─ order drawn ─ batch 0 ─ batch 1 ─ ... ─ checkpoint (state B)
    resumed        state A ─ order drawn ─ pass over ─────────────── state B ─ next batch

What is counted is samples over all replicas, so another number of replicas continues at the same sample. A stream (an
``IterableDataset``) has no sampler: its consumed batches are loaded and dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
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
        random_state: of the global generators when the checkpoint was saved.
        device: whose generator is among them.
    """

    def __init__(self, epoch: int, random_state: dict[str, Any], device: torch.device) -> None:
        self.epoch = epoch
        self._random_state = random_state
        self._device = device
        self.waiting: list[_ResumableIterator] = []
        self.is_over = False

    def rewind(self) -> None:
        """Set the global generators to where the checkpoint was saved."""
        restore_rng_state(self._random_state, self._device)

    def reach(self) -> None:
        """The first batch is about to be fetched: make the iterators of an epoch that begins now, in their order."""
        self.is_over = True
        waiting, self.waiting = self.waiting, []
        for iterator in waiting:
            iterator.make()


class ResumableLoader(DataLoader[Any]):
    """Mixed into the class of a loader by :func:`make_resumable`; not to be constructed."""

    resume_drawn: dict[str, Any] | None
    resume_skip: int
    resume_at: Continuation | None
    resume_before: dict[str, Any] | None

    def __iter__(self) -> Any:
        at, skip = self.resume_at, self.resume_skip
        if at is None or at.is_over:
            self.resume_at = None
            return super().__iter__()
        _set_sampler_epoch(self, at.epoch)
        at.rewind()
        iterator = _ResumableIterator(self, super().__iter__, at, skip)
        if skip:
            iterator.make()
        else:
            at.waiting.append(iterator)
        return iterator

    @property
    def _index_sampler(self) -> Any:
        streams = isinstance(self.dataset, IterableDataset)
        passed = self.resume_skip if self.resume_at is not None and not streams else 0
        return _NotedSampler(super()._index_sampler, self, passed)

    def state_dict(self) -> dict[str, Any]:
        """What says to Lightning that the loader can resume; its state is in the strategy's part of a checkpoint."""
        return {"resumes": True}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: see :func:`continue_loader`."""


class _NotedSampler:
    """Notes the random state that an order is drawn from; the first time, draws it anew and passes over entries."""

    def __init__(self, sampler: Any, loader: ResumableLoader, passed: int) -> None:
        self._sampler = sampler
        self._loader = loader
        self._passed = passed

    def __iter__(self) -> Iterator[Any]:
        count, self._passed = self._passed, 0  # persistent workers keep the sampler
        if count == 0:
            before, self._loader.resume_before = self._loader.resume_before, None
            if before is not None:
                restore_rng_state(before, _CPU)
            self._loader.resume_drawn = collect_rng_state(_CPU)
            yield from self._sampler
            return
        now = collect_rng_state(_CPU)
        if self._loader.resume_drawn is not None:
            restore_rng_state(self._loader.resume_drawn, _CPU)
        entries = iter(self._sampler)
        for _ in range(count):
            next(entries, None)
        first = next(entries, _END)
        restore_rng_state(now, _CPU)
        if first is not _END:
            yield first
            yield from entries

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_sampler"], name)


class _ResumableIterator:
    """The iterator of the epoch that a run goes on in; where a new one begins, made as late as in the first run."""

    def __init__(self, loader: ResumableLoader, make: Callable[[], Any], at: Continuation, skip: int) -> None:
        self._loader = loader
        self._make = make
        self._at = at
        self._skip = skip if isinstance(loader.dataset, IterableDataset) else 0
        self._inner: Any = None
        self._started = False

    def make(self) -> None:
        """Make the loader's own iterator."""
        if self._inner is None:
            if self._loader.persistent_workers and self._at.epoch > 0 and not self._loader.resume_skip:
                # The first run's iterator was made in its first epoch: no seed for workers was drawn in this one.
                self._loader.resume_before = collect_rng_state(_CPU)
            self._inner = self._make()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.make()
        return getattr(self._inner, name)

    def __next__(self) -> Any:
        if not self._started:
            self._started = True
            self._go_on()
        return next(self._inner)

    def _go_on(self) -> None:
        now = collect_rng_state(_CPU) if self._at.is_over else None
        if self._skip:
            if self._loader.resume_drawn is not None:
                restore_rng_state(self._loader.resume_drawn, _CPU)
            for _ in range(self._skip):
                next(self._inner)
        if now is not None:
            restore_rng_state(now, _CPU)
            return
        if self._loader.resume_skip:
            self._at.rewind()
        self._at.reach()


_END = object()


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
    loader.__dict__ |= {"resume_drawn": None, "resume_skip": 0, "resume_at": None, "resume_before": None}
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
    return {"drawn": loader.resume_drawn, "batch_size": batch_size_of(loader)}


def continue_loader(
    loader: ResumableLoader, batches: int, state: dict[str, Any] | None, continuation: Continuation
) -> None:
    """Let the epoch that begins next pass over ``batches`` batches, in the order that ``state`` tells."""
    drawn = state["drawn"] if state is not None else None
    loader.__dict__ |= {"resume_drawn": drawn, "resume_skip": batches, "resume_at": continuation}
