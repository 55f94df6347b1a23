"""Position of a loader in its data, as plain data for checkpoints, and how a resumed run goes on from it."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from lightning_megatron.mesh.draws.random_streams import collect_rng_state, restore_rng_state
from lightning_megatron.mesh.marks import Marks
from lightning_megatron.strategy.data.generators import generators_in, restore_states, states_of
from lightning_megatron.strategy.data.workers import NotingIterator

_CPU = torch.device("cpu")


class Walk:
    """Of one loader.

    Attributes:
        drawn: state that the order of the present pass was drawn from.
        made: state that the iterator was made in, where that matters.
        at: where the run goes on, as long as it has not.
        skip: batches that the resumed epoch has consumed.
        passed: entries that the next order begins after.
        begun: where the workers of the next iterator begin.
        remakes: whether the next iterator is made in the state ``made``.
        rebuilds: whether workers go on that have made the previous epoch.
        is_late: whether the next iterator is made only if it is read.
        is_read_ahead: whether Lightning fetches a batch before it needs it.
        before_fetch: where the main process's generators were before the last fetch, if batches are read ahead.
    """

    def __init__(self) -> None:
        self.drawn: Any = None
        self.made: Any = None
        self.at: Any = None
        self.skip = 0
        self.passed = 0
        self.begun: list[Any] | None = None
        self.remakes = False
        self.rebuilds = False
        self.is_late = False
        self.is_read_ahead = False
        self.before_fetch: Any = None
        self._saved: dict[str, Any] = {}
        self._iterator: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the iterator, which belongs to this process."""
        return self.__dict__ | {"_iterator": None}

    def follow(self, iterator: NotingIterator) -> None:
        """The workers of this iterator are the present ones."""
        self._iterator = weakref.ref(iterator)

    def state(self, loader: Any, fetched: int, ahead: int) -> dict[str, Any]:
        """State from which :meth:`go_on` continues.

        Args:
            loader: whose walk this is.
            fetched: batches of the present pass that the run has consumed.
            ahead: batches that were fetched beyond them.
        """
        iterator = self._iterator() if self._iterator is not None else None
        state = {
            "drawn": self.drawn,
            "made": self.made,
            "own": states_of(_of_order(loader)),
            "data": states_of(_of_data(loader)),
            "fetched": fetched,
            "before_fetch": self.before_fetch if ahead and not loader.num_workers else None,
        }
        if iterator is not None:
            workers = iterator.workers
            state["workers"] = {
                "begun": workers.begun,
                "given_out": workers.after(ahead),
                "batches": workers.batches - ahead,
            }
        return state

    def go_on(self, loader: Any, state: dict[str, Any], skip: int, at: Any, exact: bool) -> None:
        """Let the next pass begin after ``skip`` batches, or, with none of them, as a new one.

        Args:
            loader: whose walk this is.
            state: from a checkpoint.
            skip: batches to pass over.
            at: where all loaders go on, or ``None`` if the end of an epoch has yet to come.
            exact: whether batches and workers are those of the run that was saved.
        """
        self.drawn, self.made, self._saved = state.get("drawn"), state.get("made"), state
        self.before_fetch = state.get("before_fetch") if exact else None
        self.skip, self.at, self.is_late = skip, at, at is None
        self.restore(loader)
        if not exact:
            self._saved = {key: value for key, value in state.items() if key != "workers"}
        self.rebuilds = not skip and loader.num_workers > 0 and loader.persistent_workers and "workers" in self._saved

    def restore(self, loader: Any) -> None:
        """Put the generators that samplers and data set keep to themselves where they were."""
        restore_states(_of_order(loader), self._saved.get("own", {}))
        restore_states(_of_data(loader), self._saved.get("data", {}))

    def begin_again(self, streams: bool, passed: int) -> None:
        """The next iterator to be made is one of the run that was saved, after ``passed`` batches."""
        workers = self._saved.get("workers")
        self.passed, self.remakes = passed, self.made is not None
        self.begun = None if workers is None else workers["begun" if streams else "given_out"]

    @property
    def batches_of_workers(self) -> int:
        """Batches that the workers had made, and the run consumed, of the pass that was saved."""
        return int(self._saved["workers"]["batches"])


def walk_of(loader: Any) -> Walk:
    """The walk of a loader, made when first asked for; Lightning copies none from loader to loader."""
    marks = Marks.of(loader)
    return marks.get(Walk) or marks.put(Walk())


def _of_data(loader: Any) -> dict[str, Any]:
    return generators_in({"dataset": loader.dataset, "collate_fn": loader.collate_fn})


def _of_order(loader: Any) -> dict[str, Any]:
    """Without what a sampler reaches through the data set that it holds."""
    holders = {name: getattr(loader, name, None) for name in ("generator", "sampler", "batch_sampler")}
    holders["sampler"] = getattr(holders["sampler"], "dealt", holders["sampler"])  # one replica has it under that path
    found = generators_in(holders)
    of_data = {id(generator) for generator in _of_data(loader).values()}
    return {path: generator for path, generator in found.items() if id(generator) not in of_data}


def order_state(loader: Any) -> dict[str, Any]:
    """Of all generators that an order may be drawn from."""
    return collect_rng_state(_CPU) | {"own": states_of(_of_order(loader))}


def restore_order(loader: Any, state: dict[str, Any]) -> None:
    """Inverse of :func:`order_state`."""
    restore_rng_state(state, _CPU)
    restore_states(_of_order(loader), state.get("own", {}))


def fetch_state(loader: Any) -> dict[str, Any]:
    """Of all generators that a fetch in the main process may draw from."""
    return collect_rng_state(_CPU) | {"data": states_of(_of_data(loader))}


def restore_fetch(loader: Any, state: dict[str, Any]) -> None:
    """Inverse of :func:`fetch_state`."""
    restore_rng_state(state, _CPU)
    restore_states(_of_data(loader), state.get("data", {}))


def batch_size_of(loader: Any) -> int | None:
    """Samples per batch of one replica, where the loader tells."""
    for holder in (getattr(loader, "batch_sampler", None), loader):
        size = getattr(holder, "batch_size", None)
        if isinstance(size, int):
            return size
    return None
