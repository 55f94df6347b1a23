"""Loader workers go on with the random numbers that they would have drawn next.

A worker keeps its generators to itself, and has always drawn for batches that nobody has read yet. So each batch brings
along where its worker's generators were after it, if they have moved at all, and the main process remembers that of
the last batch it gave out. Workers that are started to go on begin there, and the first batch goes to the worker whose
turn it was::

    worker 0    batch 0 ─ batch 2 ─ batch 4 (ahead)        goes on after batch 2, with batch 4
    worker 1    batch 1 ─ batch 3 (ahead)                  goes on after batch 1, with batch 3, which comes first
    given out   batches 0, 1, 2

What a batch brings along is taken off before anyone sees it, and nothing draws other numbers than without it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_megatron.mesh.draws.random_streams import collect_rng_state, restore_rng_state
from lightning_megatron.strategy.data.generators import generators_in, restore_states, states_of

_CPU = torch.device("cpu")


@dataclass
class PendingBatch:
    """A batch on its way from a worker.

    Attributes:
        batch: what ``collate_fn`` made.
        worker: its number.
        state: of the worker's generators after the batch; ``None`` if they are where they were before.
    """

    batch: Any
    worker: int
    state: Any

    def pin_memory(self) -> PendingBatch:
        """Called by the loader's thread, with ``pin_memory=True``."""
        self.batch = pin_memory(self.batch)
        return self


class WorkerNotes:
    """Inside a worker: notes where its generators are.

    Args:
        collate: the loader's ``collate_fn``.
        init: its ``worker_init_fn``.
        states: where each worker begins; ``None`` where it is seeded, and for a worker that has drawn nothing.
    """

    def __init__(
        self, collate: Callable[[Any], Any], init: Callable[[int], Any] | None, states: list[Any] | None
    ) -> None:
        self._collate = collate
        self._init = init
        self._states = states
        self._own: dict[str, Any] = {}
        self._last: Any = None

    def start(self, worker: int) -> None:
        """Takes the place of ``worker_init_fn``."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that trains, which still needs batches
        if self._init is not None:
            self._init(worker)
        info = get_worker_info()
        self._own = generators_in({"dataset": info.dataset if info else None, "collate_fn": self._collate})
        given = self._states[worker] if self._states is not None else None
        if given is not None:
            restore_rng_state(given | {"torch": torch.tensor(list(given["torch"]), dtype=torch.uint8)}, _CPU)
            restore_states(self._own, given["own"])
        self._states = None
        self._last = self._state()

    def collate(self, samples: Any) -> PendingBatch:
        """Takes the place of ``collate_fn``, which comes last when a batch is made."""
        batch = self._collate(samples)
        info = get_worker_info()
        state = self._state()
        moved = state != self._last
        self._last = state
        return PendingBatch(batch, info.id if info is not None else 0, state if moved else None)

    def _state(self) -> dict[str, Any]:
        """Comparable, and without tensors: those would travel through shared memory."""
        found = collect_rng_state(_CPU) | {"own": states_of(self._own)}
        return found | {"torch": found["torch"].numpy().tobytes()}


class WorkerStates:
    """In the main process: where each worker was after the last batch that was given out.

    Args:
        begun: where each began; ``None`` for a worker that was only seeded.
        batches: batches of the pass that were passed over.
    """

    def __init__(self, begun: list[Any], batches: int) -> None:
        self.batches = batches
        self._received = list(begun)
        self.begun = list(begun)
        self.given_out = list(begun)
        self._before_last: tuple[int, Any] | None = None

    def begin(self) -> None:
        """Start a new pass over the data; prefetched batches are dropped."""
        self.begun, self.given_out = list(self._received), list(self._received)
        self._before_last = None
        self.batches = 0

    def receive(self, noted: PendingBatch) -> None:
        """A batch has arrived, perhaps before others that come first."""
        if noted.state is None:
            noted.state = self._received[noted.worker]
        self._received[noted.worker] = noted.state

    def give_out(self, noted: PendingBatch) -> Any:
        """The batch itself."""
        self._before_last = noted.worker, self.given_out[noted.worker]
        self.given_out[noted.worker] = noted.state
        self.batches += 1
        return noted.batch

    def after(self, ahead: int) -> list[Any]:
        """State of the workers after all batches given out but the last ``ahead`` (none or one)."""
        states = list(self.given_out)
        if ahead and self._before_last is not None:
            worker, state = self._before_last
            states[worker] = state
        return states


class NotingIterator(_MultiProcessingDataLoaderIter):
    """Torch's iterator, which also removes the recorded states from the batches.

    Args:
        loader: with :class:`WorkerNotes` in it.
        begun: where its workers begin.
        passed: batches that are passed over; the first to come goes to the worker whose turn it is then.
    """

    def __init__(self, loader: DataLoader[Any], begun: list[Any], passed: int) -> None:
        self.workers = WorkerStates(begun, passed)
        self._turn = passed % loader.num_workers
        super().__init__(loader)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        if not first_iter:
            self.workers.begin()

    def _try_put_index(self) -> None:
        for _ in range(self._turn):
            next(self._worker_queue_idx_cycle)
        self._turn = 0
        super()._try_put_index()

    def _get_data(self) -> Any:
        found = super()._get_data()
        if isinstance(found[1], PendingBatch):
            self.workers.receive(found[1])
        return found

    def __next__(self) -> Any:
        found = super().__next__()
        return self.workers.give_out(found) if isinstance(found, PendingBatch) else found


def noting_iterator(loader: Any, begun: list[Any] | None, passed: int) -> NotingIterator:
    """An iterator over ``loader`` that notes where workers are; the loader itself stays as it is."""
    collate, init = loader.collate_fn, loader.worker_init_fn
    notes = WorkerNotes(collate, init, begun)
    loader.collate_fn, loader.worker_init_fn = notes.collate, notes.start
    try:
        return NotingIterator(loader, begun if begun is not None else [None] * loader.num_workers, passed)
    finally:
        loader.collate_fn, loader.worker_init_fn = collate, init
