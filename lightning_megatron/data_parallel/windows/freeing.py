"""When whole weights are freed: after their layer, or at the end of the step, which then gathers them once.

With ``auto`` the run decides, per stage, from what its schedule does and how much memory its fullest moment leaves::

    step 1   layers are freed; the optimizer makes its state
    step 2   layers are freed; how often does each open, and how much memory is free at the fullest moment?
    step 3   one micro-batch: each layer opens twice                       ─▶ layer
             several, and twice the whole weights fit on every replica     ─▶ step
             several, and they do not                                      ─▶ layer

A layer runs forward once in each micro-batch, which is how those are counted here. Early stages of a pipeline keep more
activations, so they may free layers where late ones keep them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lightning_megatron.data_parallel.buckets.host_memory import GIB, free_bytes
from lightning_megatron.data_parallel.windows.window import Window
from lightning_megatron.mesh.messages.collectives import raw_all_gather

_ROOM = 2
_SEVERAL = 2


class Freeing:
    """Decides for the windows of one rank.

    Args:
        asked: ``layer``, ``step`` or ``auto``.
        windows: of this rank.
        room: bytes that are free now, for this rank; measured by default.

    Attributes:
        keeps: whether windows stay open to the end of a step.
        chosen: what ``auto`` has come to and why, in words; empty before, and where a user has said it.
    """

    def __init__(self, asked: str, windows: Sequence[Window], room: Callable[[], int] | None = None) -> None:
        self.keeps, self.chosen = asked == "step", ""
        self._windows, self._room = windows, room or (lambda: _free_now(windows))
        self._decides = asked == "auto" and any(window.buckets for window in windows)
        self._updated = self._looks = False
        self._forwards = Counter[int]()
        self._least: int | None = None

    def begin(self) -> None:
        """A step begins, all windows closed."""
        self._looks, self._least = self._decides and self._updated, None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around forwards that do not belong to a step, and are not counted."""
        looks, self._looks = self._looks, False
        yield
        self._looks = looks

    def ran(self, window: Window) -> None:
        """A layer's forward is through."""
        if self._looks:
            self._forwards[window.number] += 1

    def look(self) -> None:
        """Note how much memory is free, where a backward comes to a layer."""
        if self._looks:
            free = self._room()
            self._least = free if self._least is None else min(free, self._least)

    def end(self, *, updates: bool) -> None:
        """A step's last backward has run; collective over the replicas where it decides.

        Args:
            updates: whether the optimizers step now, who have their state from then on.
        """
        if self._looks:
            self._decide()
        self._updated |= updates

    def _decide(self) -> None:
        self._decides = self._looks = False
        times = min(self._forwards.values(), default=0)
        if times < _SEVERAL:
            self.chosen = "free='layer', as a step has one micro-batch"
            return
        needs = _ROOM * sum(p.numel() * p.element_size() for window in self._windows for p in window.parameters)
        least = min(self.everywhere(self._room() if self._least is None else self._least))
        self.keeps = least >= needs
        self.chosen = (
            f"free={'step' if self.keeps else 'layer'!r}, as layers run {times} times in a step, and of the "
            f"{_words(needs)} that should be free to keep them, {_words(least)} are at its fullest moment"
        )

    def lacks(self, windows: Iterable[Window]) -> str:
        """Memory that some replica lacks to open windows, in words; "" for none. Collective over the replicas.

        Args:
            windows: those to open, the same on all replicas.
        """
        needs = sum(p.numel() * p.element_size() for window in windows for p in window.parameters)
        least = min(self.everywhere(self._room()), default=needs) if needs else 0
        return f"{_words(needs)} are needed, and {_words(least)} free" if least < needs else ""

    def everywhere(self, number: int) -> list[int]:
        """A number of each replica that shares the weights; empty where none are shared. Collective over them."""
        bucket = next((bucket for window in self._windows for bucket in window.buckets), None)
        if bucket is None:
            return []
        own = torch.tensor([number], device=bucket.parameters[0].device)
        return [int(each) for each in raw_all_gather(own, 0, bucket.sharing.shard_group).tolist()]


def _free_now(windows: Iterable[Window]) -> int:
    """Free memory of this rank's device, or its share of the host's."""
    device = next(parameter.device for window in windows for parameter in window.parameters)
    if device.type != "cuda":
        return free_bytes(None) // int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def _words(size: int) -> str:
    return f"{size / GIB:.3g} GiB" if size >= GIB / 10 else f"{1024 * size / GIB:.3g} MiB"
