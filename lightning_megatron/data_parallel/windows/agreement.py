"""Replicas tell each other which window they open, since each gather is a collective of all of them.

Nobody waits for that where a step goes on as the one before did: the gather of the window was begun by all replicas at
the opening before, so it can be finished whatever the others do, and what they have told is read at the next opening::

    open 0   tell 0, read 0           gather 0, begin 1
    open 1   tell 1         finish 1,           begin 2
    open 2   read 1, tell 2, finish 2,          begin 3        another replica opens 3 here: both learn it, at the
    open 3   read 2: an error                                  latest when they open their next window

With the window they tell how many of their gradients' buckets are complete, and what has been read says how many sums
start there, on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_megatron.data_parallel.buckets.bucket import Bucket
from lightning_megatron.data_parallel.buckets.buckets import GradientBuckets
from lightning_megatron.mesh.messages.exchange import Numbers
from lightning_megatron.mesh.messages.of_weights import messages_of_weights


class Agreement:
    """What the replicas that share one copy of the weights have told each other.

    Args:
        buckets: of any of the windows.
        windows: how many there are.
        gradients: whose sums start between the messages of the windows.
    """

    def __init__(self, buckets: Sequence[Bucket], windows: int = 1, gradients: GradientBuckets | None = None) -> None:
        self._windows, self._gradients = max(windows, 1), gradients
        self._numbers = Numbers(buckets[0].sharing.shard_group, buckets[0].parameters[0].device) if buckets else None
        self._told: tuple[str, int] | None = None

    def tell(self, name: str, number: int) -> None:
        """Tell which window this replica opens, once the last one has been read; collective over the replicas."""
        self.read()
        if self._numbers is not None:
            complete = self._gradients.complete if self._gradients is not None else 0
            with messages_of_weights:
                self._numbers.start(number + self._windows * complete)
            self._told = name, number

    def read(self) -> None:
        """Wait for what the others have told last, if that was not done.

        Raises:
            RuntimeError: another replica opened another window.
        """
        if self._told is None or self._numbers is None:
            return
        (name, number), self._told = self._told, None
        complete, opened = zip(*(divmod(told, self._windows) for told in self._numbers.finish()), strict=True)
        if any(other != number for other in opened):
            raise RuntimeError(
                f"`{name}` runs while other replicas run another layer: which layers run depends on the batch or "
                "on random numbers of a replica. `weight_sharding=True` gathers a layer's weights when it runs, so "
                "every replica must run the same layers in the same order; pass `weight_sharding=False`."
            )
        if self._gradients is not None:
            self._gradients.launch(min(complete))
