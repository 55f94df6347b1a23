"""Gradients on their way to an optimizer in host memory, from the moment that they are summed.

::

    backward   layer 3   layer 2   layer 1   layer 0
    sums                 3         2         1         0
    link                           3         2         1         0         meanwhile the update steps on 3

What clips gradients between the backward and the update is done to both, those on the device and their copies. Where
other code has written into the gradients of a bucket, they are sent again when the update comes to it. So are those
that the update rounds to the 16 bits of its weights, once something clips them, as a rounded gradient cannot be clipped
as the whole one would be; from then on they leave for the update only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from lightning_megatron.data_parallel.buckets.bucket import Bucket
from lightning_megatron.data_parallel.buckets.host_memory import HostMemory
from lightning_megatron.data_parallel.buckets.shards import ShardPart
from lightning_megatron.mesh.messages.host_link import Copy, HostLink

Change = Callable[[Tensor], object]
"""Changes every element of a tensor by itself, in place, on any device to the same bits."""


class SentGradients:
    """Copies of the gradients of this rank's shards in host memory, begun during the backward.

    Args:
        memory: of this host; ``None`` where nothing lies there.
        link: between it and the device.
    """

    def __init__(self, memory: HostMemory | None = None, link: HostLink | None = None) -> None:
        self._memory, self._link = memory, link
        self._sent: dict[int, _SentBucket] = {}  # by id of a bucket; those live as long as this
        self._near, self._clipped = set[int](), set[int]()

    @property
    def goes_ahead(self) -> bool:
        """Whether copies go on while the device computes, so that it pays to begin them early."""
        return self._link is not None and type(self._link) is not HostLink

    def send(self, bucket: Bucket, gradients: Tensor, divide_by: float = 1.0) -> None:
        """Begin to copy a bucket's gradients, which are summed, unless that was done.

        Args:
            bucket: of the gradients.
            gradients: [shard], this rank's shard of the sum.
            divide_by: what the sum will be divided by in place, as the copy is now; written to otherwise, it has to be
                sent again.
        """
        memory, link = self._memory, self._link
        if memory is None or link is None or not bucket.hosted or id(bucket) in (self._near | self._clipped):
            return
        before = self._sent.get(id(bucket))
        if before is not None and before.is_of(gradients):
            return
        if before is not None:
            before.wait()  # of an update that was left out
        divided = gradients if divide_by == 1.0 else gradients / divide_by
        rounded = divided.to(bucket.master.dtype)
        buffer = memory.empty(rounded.numel(), rounded.dtype) if before is None else before.buffer
        writes = int(divided is not gradients)
        self._sent[id(bucket)] = _SentBucket(gradients, buffer, link.start(buffer, rounded), writes)

    def step_near(self, bucket: Bucket, near: bool) -> None:
        """Note whether an optimizer steps on a bucket on the device, where its gradients stay from now on."""
        (self._near.add if near else self._near.discard)(id(bucket))

    def of(self, bucket: Bucket) -> tuple[Tensor, Copy] | None:
        """The copy of a bucket's gradients, to be waited for; ``None`` if there is none of the present ones."""
        sent = self._sent.get(id(bucket))
        return (sent.buffer, sent) if sent is not None and sent.is_of(bucket.own_gradients) else None

    def change(self, bucket: Bucket | None, index: int, gradient: Tensor, change: Change) -> None:
        """Change a parameter's gradient, and the copy of the part that this rank's optimizer updates.

        Args:
            bucket: of the parameter, if it has one.
            index: its place there.
            gradient: what this rank holds of it.
            change: how.
        """
        sent = self._sent.get(id(bucket)) if bucket is not None else None
        if bucket is None or sent is None or not sent.is_of(bucket.own_gradients):
            change(gradient)
            return
        sent.arrive()  # the copy reads what is changed here
        change(gradient)
        if sent.buffer.dtype != gradient.dtype:
            self._clipped.add(id(bucket))
            del self._sent[id(bucket)]
            return
        piece = bucket.pieces.get(index)
        sent.note(bucket.own_gradients, None if piece is None else piece.part, change)


class _SentBucket(Copy):
    """The copy of one bucket's gradients.

    Args:
        gradients: [shard], on the device.
        buffer: [shard], in host memory.
        copy: from one to the other.
        writes: how often the gradients will be written to before they are what was copied.
    """

    def __init__(self, gradients: Tensor, buffer: Tensor, copy: Copy, writes: int = 0) -> None:
        self.buffer, self._copy = buffer, copy
        self._storage, self._version = weakref.ref(gradients.untyped_storage()), gradients._version + writes
        self._changes: list[tuple[ShardPart, Change]] = []

    def is_of(self, gradients: Tensor) -> bool:
        """Whether these are the gradients that were copied, and only :meth:`note` has heard of changes."""
        return self._storage() is gradients.untyped_storage() and self._version == gradients._version

    def note(self, gradients: Tensor, part: ShardPart | None, change: Change) -> None:
        """Let a change, which was made to the gradients, be made to the copy too; ``None`` if it has no such part."""
        self._version = gradients._version
        if part is not None:
            self._changes.append((part, change))

    def arrive(self) -> None:
        """Wait for the copy."""
        self._copy.wait()
        self._copy = Copy()

    def wait(self) -> None:
        """Wait for the copy, and change it as the gradients were changed."""
        self.arrive()
        changes, self._changes = self._changes, []
        for part, change in changes:
            change(part.of(self.buffer))
