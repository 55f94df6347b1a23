"""Lets updated weights arrive while the next step begins: their windows open where they are used for the first time.

::

    update │ gathers: bucket 2 ─ bucket 1 ─ bucket 0
           │ loader, embedding ─ open 2 ─ layer 0 ─ open 1 ─ layer 1 ─ ...

Here a window is a bucket of weights that have memory all along (ZeRO-1). A module that holds some of them opens it, and
so does any other torch function that uses one. Once open, it stays so until the next update. Until then its weights
read as NaN, for functions that torch does not report.

Compiled code finds its weights there when a step begins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from lightning_megatron.data_parallel.buckets.bucket import Bucket
from lightning_megatron.data_parallel.buckets.buckets import GradientBuckets
from lightning_megatron.data_parallel.windows.openers import Openers
from lightning_megatron.data_parallel.windows.reported_uses import Watch, is_watchable
from lightning_megatron.data_parallel.windows.window import Window
from lightning_megatron.mesh.parts.names import Parts, parent


class ArrivingWindows:
    """The windows of weights that one rank's replicas update for each other.

    Args:
        module: holds the weights.
        buckets: of them.

    Attributes:
        under_way: those whose weights have not been waited for, in the order in which they come.
        active: whether there are any.
    """

    closes = False

    def __init__(self, module: nn.Module, buckets: GradientBuckets) -> None:
        self._openers, self._buckets = Openers(module, self), buckets
        self._windows: dict[int, Window] = {}  # by id of a bucket
        self._holders = defaultdict[int, list[str]](list)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._holders[id(parameter)].append(parent(name))
        compiled = Parts(name for name, child in module.named_modules() if _is_compiled(child))
        self._unseen = {id(p) for name, p in module.named_parameters() if name in compiled or not is_watchable(p)}
        self._early: list[Window] = []
        self.under_way, self.active = list[Window](), False
        self._stepping, self._unused = False, set[int]()
        self._watch = Watch(self._openers.used)
        for bucket in buckets.buckets:
            self._add(bucket)
        buckets.on_arrival = self._check

    def close(self) -> None:
        """Wait for all weights, and leave the modules' forwards as they were."""
        self.finish()
        self._openers.remove()
        self._buckets.on_arrival = None

    def start(self, buckets: Sequence[Bucket]) -> None:
        """Begin to gather updated weights, last bucket first: the order in which the forward needs them.

        Args:
            buckets: which have been updated, the same on all replicas; collective over them.
        """
        for bucket in reversed(buckets):
            window = self._windows.get(id(bucket)) or self._add(bucket)
            window.renew()
            self.under_way.append(window)
        self.active = bool(self.under_way)
        if self._stepping:
            self._begin()

    def finish(self) -> None:
        """Wait for all weights under way."""
        while self.under_way:
            self.open(self.under_way[0])

    def _add(self, bucket: Bucket) -> Window:
        self._windows[id(bucket)] = window = Window(bucket.names[0], len(self._windows), [bucket])
        holders = {name: None for parameter in bucket.parameters for name in self._holders[id(parameter)] if name}
        self._openers.add(window, holders)
        if not self._unseen.isdisjoint(map(id, bucket.parameters)):
            self._early.append(window)
        return window

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a training step, or the forward of one."""
        self._stepping = True
        self._begin()
        try:
            yield
        finally:
            self._stepping, self._unused = False, {id(window) for window in self.under_way}
            self.finish()  # for a backward

    def _begin(self) -> None:
        for window in self._early:
            self.open(window)
        for window in self.under_way:
            self._watch.begin(window.parameters)

    def open(self, window: Window) -> None:
        """Wait for the weights of a window, unless they are there."""
        if not window.is_open:
            self._watch.end(window.parameters)
            window.open()
            self.under_way.remove(window)
            self.active = bool(self.under_way)

    def gather_ahead(self) -> None:
        """Do nothing: all that follows is under way."""

    def leave(self, window: Window) -> None:
        """Do nothing: weights stay."""

    def need(self, window: Window) -> None:
        """Do nothing: weights are there once the forward has used them."""

    def _check(self, bucket: Bucket, index: int) -> None:
        """Refuse the gradient of a weight that was used before it was there, as what used it has told nobody.

        Args:
            bucket: of the parameter whose gradient has arrived.
            index: of the parameter in the bucket.

        Raises:
            RuntimeError: nothing has waited for the weight in the forward.
        """
        window = self._windows.get(id(bucket))
        if window is not None and (not window.is_open or id(window) in self._unused):
            raise RuntimeError(
                f"`{bucket.names[index]}` was used in a function that torch does not report, without a call of the "
                "module that holds it, while its new values may have been under way; pass "
                "`overlap_parameter_gather=False`."
            )


def _is_compiled(module: nn.Module) -> bool:
    compiled = "_orig_mod" in module._modules or module._compiled_call_impl is not None
    return compiled or isinstance(module, torch.jit.ScriptModule)
