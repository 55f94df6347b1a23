"""Any ``DataLoader`` goes on where a run stopped: same order, no sample twice, none left out.

A sampler draws the order of an epoch from the global generators, from one of its own, or from a seed and the epoch.
Their state is noted just before. To resume, the order is drawn from that state again, the batches that were consumed
are passed over in the sampler, without loading them, and the generators are put where they were when the checkpoint was
saved; so are those of loader workers (:mod:`lightning_megatron.strategy.data.workers`)::

    epoch starts   state A ─ order drawn ─ batch 0 ─ batch 1 ─ ... ─ checkpoint (state B)
    resumed        state A ─ order drawn ─ pass over ─────────────── state B ─ next batch

What is counted is samples over all replicas, so another number of replicas continues at the same sample. A stream (an
``IterableDataset``) has no sampler: its consumed batches are loaded and dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_megatron.mesh.draws.random_streams import collect_rng_state, restore_rng_state
from lightning_megatron.strategy.data.walk import (
    Walk,
    fetch_state,
    order_state,
    restore_fetch,
    restore_order,
    walk_of,
)
from lightning_megatron.strategy.data.workers import noting_iterator
from lightning_megatron.strategy.lightning.trainer_access import set_sampler_epoch

_CPU = torch.device("cpu")


class Continuation:
    """Positions from which all loaders of a run go on.

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
        self.has_begun = False

    def begin(self) -> None:
        """Batches that come next find the generators where they are from now on: a validation may come before them."""
        self.rewind()
        self.has_begun = True

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

    def __iter__(self) -> Any:
        walk = walk_of(self)
        at, is_late = walk.at, walk.is_late
        walk.is_late = False
        if walk.rebuilds:
            self._rebuild(walk)
        if is_late:
            return _LateIterator(self, super().__iter__)
        if at is None or at.is_over:
            walk.at = None
            return super().__iter__()
        set_sampler_epoch(self, at.epoch)
        at.rewind()
        iterator = _ResumableIterator(self, super().__iter__, at)
        if walk.skip:
            walk.begin_again(_streams(self), walk.skip)
            iterator.make()
        else:
            at.waiting = [other for other in at.waiting if other.loader is not self] + [iterator]
        return iterator

    def _rebuild(self, walk: Walk) -> None:
        """Make the iterator whose workers go on in the next epoch, as it was at the end of the one before."""
        walk.rebuilds = False
        walk.begin_again(_streams(self), walk.batches_of_workers)
        now = order_state(self)
        iterator = self._get_iterator()
        if _streams(self) and any(iterator.workers.begun):
            for _ in range(walk.batches_of_workers):
                next(iterator, None)
        self._iterator = iterator
        walk.passed = 0
        restore_order(self, now)

    def _get_iterator(self) -> Any:
        walk = walk_of(self)
        now = collect_rng_state(_CPU) if walk.remakes else None
        if now is not None:
            walk.remakes = False
            restore_order(self, walk.made)
        walk.made = order_state(self) if self.num_workers or _streams(self) else None
        iterator = self._make_iterator(walk)
        if now is not None:
            restore_rng_state(now, _CPU)
        return iterator

    def _make_iterator(self, walk: Walk) -> Any:
        making = super()._get_iterator
        if self.num_workers == 0 or making.__func__ is not DataLoader._get_iterator:  # type: ignore[attr-defined]
            return making()
        self.check_worker_number_rationality()
        begun, walk.begun = walk.begun, None
        iterator = noting_iterator(self, begun, 0 if _streams(self) else walk.passed)
        walk.follow(iterator)
        return iterator

    @property
    def _index_sampler(self) -> Any:
        return _NotedSampler(super()._index_sampler, self, 0 if _streams(self) else walk_of(self).passed)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (type(self).__mro__[2],), self.__dict__  # pickle would look for a class of the original's name

    def state_dict(self) -> dict[str, Any]:
        """Marks the loader as resumable for Lightning; its position is in the strategy's part of a checkpoint."""
        return {"resumes": True}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: see :func:`continue_loader`."""


def _streams(loader: Any) -> bool:
    return isinstance(loader.dataset, IterableDataset)


class _NotedSampler:
    """Records the random state from which an order is drawn; the first time, restores that state and skips entries."""

    def __init__(self, sampler: Any, loader: ResumableLoader, passed: int) -> None:
        self._sampler = sampler
        self._walk = walk_of(loader)
        # Not the loader itself: it keeps the iterator of persistent workers, which keeps this sampler.
        names = ("dataset", "collate_fn", "generator", "sampler", "batch_sampler", "num_workers")
        self._parts = SimpleNamespace(**{name: getattr(loader, name, None) for name in names})
        self._passed = passed

    def __iter__(self) -> Iterator[Any]:
        walk = self._walk
        count, self._passed = self._passed, 0  # persistent workers keep the sampler
        if count:
            walk.passed = 0
            yield from self._after(count, walk)
            return
        walk.drawn = order_state(self._parts)
        yield from self._noted(iter(self._sampler), walk)

    def _after(self, count: int, walk: Walk) -> Iterator[Any]:
        now = collect_rng_state(_CPU)
        if walk.drawn is not None:
            restore_order(self._parts, walk.drawn)
        entries = iter(self._sampler)
        for _ in range(count):
            next(entries, None)
        first = next(entries, _END)
        restore_rng_state(now, _CPU)
        if first is _END:
            return
        yield first
        yield from self._noted(entries, walk)

    def _noted(self, entries: Iterator[Any], walk: Walk) -> Iterator[Any]:
        if self._parts.num_workers:
            yield from entries
            return
        while True:
            if walk.is_read_ahead:
                walk.before_fetch = fetch_state(self._parts)
            entry = next(entries, _END)
            if entry is _END:
                return
            yield entry

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_sampler"], name)


class _LateIterator:
    """The loader's own iterator, made as late as in the first run."""

    def __init__(self, loader: ResumableLoader, make: Callable[[], Any]) -> None:
        self.loader = loader
        self._make = make
        self._inner: Any = None

    def make(self) -> None:
        """Make the loader's own iterator."""
        if self._inner is None:
            self._inner = self._make()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.make()
        return getattr(self._inner, name)

    def __next__(self) -> Any:
        self.make()
        return next(self._inner)


class _ResumableIterator(_LateIterator):
    """Iterator of the epoch in which a run resumes."""

    def __init__(self, loader: ResumableLoader, make: Callable[[], Any], at: Continuation) -> None:
        super().__init__(loader, make)
        self._at = at
        self._started = False

    def __next__(self) -> Any:
        if self._started:
            return next(self._inner)
        self._started = True
        self._go_on()
        self.make()
        walk = walk_of(self.loader)
        before, walk.before_fetch = walk.before_fetch, None
        if before is None or not walk.skip:
            return next(self._inner)
        now = fetch_state(self.loader)
        restore_fetch(self.loader, before)
        found = next(self._inner)
        walk.before_fetch = before
        restore_fetch(self.loader, now)
        return found

    def _go_on(self) -> None:
        walk = walk_of(self.loader)
        now = collect_rng_state(_CPU) if self._at.is_over or self._at.has_begun else None
        if walk.skip and _streams(self.loader):
            if walk.drawn is not None:
                restore_order(self.loader, walk.drawn)
            for _ in range(walk.skip):
                next(self._inner)
            walk.passed = 0
            walk.restore(self.loader)
        if now is not None:
            restore_rng_state(now, _CPU)
        elif walk.skip:
            self._at.rewind()
        if not self._at.is_over:
            self._at.reach()


_END = object()


@functools.cache
def _resumable_class(original: type) -> type:
    """One class per class of loader, so that equal loaders stay equal."""
    return type(original.__name__, (ResumableLoader, original), {"__module__": original.__module__})


def _rebuilt(original: type) -> Any:
    """A loader of the class for ``original``, to be given its state."""
    made: Any = _resumable_class(original)
    return made.__new__(made)


def make_resumable(loader: Any) -> Any:
    """Let a ``DataLoader`` go on where a run stopped, in place; others, and those that can already, are left alone."""
    if not isinstance(loader, DataLoader) or isinstance(loader, ResumableLoader):
        return loader
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return loader
    loader.__class__ = _resumable_class(type(loader))  # type: ignore[arg-type]
    return loader
