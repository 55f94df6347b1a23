"""The weights of one layer, of which a rank keeps its shard, and which are whole while the layer's *window* is open.

::

    closed   own   w1 w1 w1         parameters read as NaN, of their shapes, and take no memory
    open     flat  w0 w0 w1 w1 w1 w1 w2 w2     gathered from all replicas; parameters are views of it

The buffer stays the same object, whose memory comes and goes. What autograd saved of a weight therefore reads the
weight again once the window is open again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_megatron.data_parallel.buckets.bucket import Bucket
from lightning_megatron.data_parallel.windows.agreement import Agreement

Disguise = Callable[[Iterable[nn.Parameter]], AbstractContextManager[None]]
"""Makes weights look otherwise for a while."""


class Window:
    """The weights of one layer.

    Invariants: while it is open, each parameter is a view of its bucket's buffer, which holds the weights; while it is
    closed, the buffer has no memory. All replicas open the same windows in the same order.

    Args:
        name: of the layer.
        number: its place in that order, equal on all replicas.
        buckets: with weights that lie apart from this rank's shard of them.
        frozen: others, of parameters without gradients.
        agreement: of the replicas on what they open; one for all windows of a rank.

    Attributes:
        is_open: whether the weights are whole.
        coming: whether they are being gathered already.
        held: whether it stays open to the end of the step, as code outside of the layer has used the weights.
        opened: how often it was opened.
    """

    def __init__(
        self,
        name: str,
        number: int,
        buckets: Sequence[Bucket],
        frozen: Sequence[Bucket] = (),
        agreement: Agreement | None = None,
    ) -> None:
        self.name, self.number = name, number
        self._buckets, self._frozen = [*buckets, *frozen], list(frozen)
        weights = [bucket.weights for bucket in self._buckets if bucket.weights is not None]
        self.is_open, self.held, self.coming = all(each.shown for each in weights), False, False
        for bucket in () if self.is_open else self._buckets:
            if bucket.weights is not None and bucket.weights.shown:  # beside weights that were never whole
                bucket.hide_weights()
        self.opened = 0
        self._agreement = agreement or Agreement(())
        self._disguise: Disguise | None = None
        self._disguised = ExitStack()

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters in it."""
        return (parameter for bucket in self._buckets for parameter in bucket.parameters)

    @property
    def buckets(self) -> list[Bucket]:
        """Buckets of the weights."""
        return list(self._buckets)

    @property
    def trained(self) -> list[Bucket]:
        """Those of weights with gradients."""
        return [bucket for bucket in self._buckets if bucket not in self._frozen]

    @property
    def live_bytes(self) -> int:
        """Memory of the whole weights now: 0 while it is closed."""
        return sum(bucket.weights.flat.untyped_storage().nbytes() for bucket in self._buckets if bucket.weights)

    @property
    def kept_bytes(self) -> int:
        """Memory of this rank's shard of the weights that the layer computes with."""
        return sum(bucket.weights.own.untyped_storage().nbytes() for bucket in self._buckets if bucket.weights)

    def start(self) -> None:
        """Begin to gather the weights, ahead of their use; collective over the replicas, which all do so here."""
        if self.is_open or self.coming or not self._buckets:
            return
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for bucket in self._buckets:
                bucket.show_weights()
        self.coming = True

    def renew(self) -> None:
        """Begin to gather weights that have memory all along and were updated; collective over the replicas.

        They read as NaN until :meth:`open` has waited for them, as those of any closed window do.
        """
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for bucket in self._buckets:
                bucket.start_gather()
                if bucket.weights is not None:
                    bucket.weights.cover(bucket.parameters)
        self.is_open, self.coming = False, True

    def open(self) -> None:
        """Gather the weights, unless they are whole; collective over the replicas.

        Raises:
            RuntimeError: another replica opens another layer's window.
        """
        if self.is_open:
            return
        self.opened += 1
        if not self._buckets:  # all of its parameters were unfrozen
            self.is_open = True
            return
        with torch.no_grad(), torch._C.DisableTorchFunction():  # else those who watch uses would see one here
            self._agreement.tell(self.name, self.number)
            if not self.coming:
                self._agreement.read()
            self._start_and_finish()
        self.is_open = True
        self.disguise(self._disguise)

    def _start_and_finish(self) -> None:
        self.start()
        for bucket in self._buckets:
            bucket.finish_gather()
            if bucket.weights is not None:
                bucket.weights.uncover(bucket.parameters)
        self.coming = False

    def close(self) -> None:
        """Keep this rank's shard, with what code has written into it, and free the rest."""
        if not (self.is_open or self.coming):
            return
        self._disguised.close()
        with torch.no_grad(), torch._C.DisableTorchFunction():
            if self.coming:
                self._start_and_finish()
            for bucket in self._buckets:
                bucket.hide_weights()
        self.is_open, self.held = False, False

    def disguise(self, disguise: Disguise | None) -> None:
        """Let the weights look otherwise while the window is open, from now on; ``None`` as they are."""
        self._disguised.close()
        self._disguise = disguise
        if self.is_open and disguise is not None:
            self._disguised.enter_context(disguise(self.parameters))

    def let_go_of_unfrozen(self) -> None:
        """Leave parameters whole that are trained by now, for the buckets of gradients; collective if there are any."""
        unfrozen = [bucket for bucket in self._frozen if any(p.requires_grad for p in bucket.parameters)]
        if unfrozen:
            self.open()
            self._buckets, self._frozen = ([b for b in of if b not in unfrozen] for of in (self._buckets, self._frozen))

    def has_memory_of(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is one of the weights, or a view of one; only while the window is open."""
        place = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
        return place != 0 and place in self.places()

    def places(self) -> list[int]:
        """Addresses of the weights' memory, while the window is open."""
        return [bucket.weights.flat.untyped_storage().data_ptr() for bucket in self._buckets if bucket.weights]

    def found_again(self, tensor: Tensor) -> Callable[[], Tensor]:
        """A function that returns one of the weights, or a view of one, once the window is open again."""
        return lambda: tensor

    def agree(self) -> None:
        """Refuse that replicas come to different layers; collective over them.

        Raises:
            RuntimeError: they do.
        """
        self._agreement.tell(self.name, self.number)
        self._agreement.read()


@contextmanager
def disguised(windows: Sequence[Window], disguise: Disguise) -> Iterator[None]:
    """While it lasts, weights look otherwise wherever their windows are open."""
    for window in windows:
        window.disguise(disguise)
    try:
        yield
    finally:
        for window in windows:
            window.disguise(None)


class WindowOwner(Protocol):
    """Decides when the windows of layers close.

    Attributes:
        active: whether a call of a layer opens its windows.
        closes: whether it ever closes them while a step goes on.
    """

    active: bool
    closes: bool

    def open(self, window: Window) -> None:
        """A layer is about to run."""

    def gather_ahead(self) -> None:
        """Its windows are open."""

    def leave(self, window: Window) -> None:
        """The layer's forward is through."""

    def need(self, window: Window) -> None:
        """A backward needs the weights."""
