"""Replicas tell each other which window they open, since each gather is a collective of all of them.

Nobody waits for that where a step goes on as the one before did: the gather of the window was begun by all replicas at
the opening before, so it can be finished whatever the others do, and what they have told is read at the next opening::

    open 0   tell 0, read 0           gather 0, begin 1
    open 1   tell 1         finish 1,           begin 2
    open 2   read 1, tell 2, finish 2,          begin 3        another replica opens 3 here: both learn it, at the
    open 3   read 2: an error                                  latest when they open their next window

With the window they tell how many of their gradients' buckets are complete, and what has been read says how many sums
start there, on all of them. The others start once a backward has ended, so all tell its end, and wait: a replica whose
loss comes to fewer layers than that of another one would start them while the other still gathers.

Where a step is tried on parts of a batch, they also tell the end of each part: one replica's part may fail where the
others' go on, and they would wait for the next window of the one that has left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_megatron.data_parallel.buckets.bucket import Bucket
from lightning_megatron.data_parallel.buckets.buckets import GradientBuckets
from lightning_megatron.mesh.autograd import in_backward
from lightning_megatron.mesh.messages.exchange import Numbers
from lightning_megatron.mesh.messages.of_weights import messages_of_weights
from lightning_megatron.mesh.torch_functions import lines_of_step
from lightning_megatron.mesh.watch.echoes import RemoteFailure, is_echo


class UnlikeReplicasError(RuntimeError):
    """Replicas that share weights run different layers, so that none of them can go on."""


class Agreement:
    """Messages among the replicas that share one copy of the weights.

    Args:
        buckets: of any of the windows.
        windows: how many there are.
        gradients: whose sums start between the messages of the windows.

    Attributes:
        failed: whether replicas have come to different windows, and can make no more collectives.
    """

    def __init__(self, buckets: Sequence[Bucket], windows: int = 1, gradients: GradientBuckets | None = None) -> None:
        self._end, self._gradients = max(windows, 1), gradients  # the number after those of windows
        self._numbers = Numbers(buckets[0].sharing.shard_group, buckets[0].parameters[0].device) if buckets else None
        self._told: tuple[str, int] | None = None
        self.failed = False

    def tell(self, name: str, number: int) -> None:
        """Tell which window this replica opens, once the last one has been read; collective over the replicas."""
        self.read()
        if self._numbers is not None:
            complete = self._gradients.complete if self._gradients is not None else 0
            with messages_of_weights:
                self._numbers.start(number + (self._end + 1) * complete)
            self._told = name, number

    def read(self) -> None:
        """Wait for what the others have told last, if that was not done.

        Raises:
            UnlikeReplicasError: another replica opened another window, or left the part of a batch.
        """
        if self._told is None or self._numbers is None:
            return
        (name, number), self._told = self._told, None
        complete, opened = zip(*(divmod(told, self._end + 1) for told in self._numbers.finish()), strict=True)
        self.failed = any(other != number for other in opened)
        if self.failed:
            here = f"this replica has come to {name}" if number == self._end else f"`{name}` runs"
            there = "have come to an end" if self._end in opened and number != self._end else "run another layer"
            lines = "" if in_backward() else lines_of_step()
            raise UnlikeReplicasError(
                f"{here} while other replicas {there}: which layers run, or which the loss comes to, depends on the "
                "batch or on random numbers of a replica. `weight_sharding=True` gathers a layer's weights when it "
                "runs, forward and backward, so every replica must run the same layers in the same order; pass "
                "`weight_sharding=False`." + (f" This replica is at {lines}." if lines else "")
            )
        if self._gradients is not None:
            self._gradients.launch(min(complete))

    def end_backward(self) -> None:
        """Wait until the backward of all replicas has ended; collective over them.

        Raises:
            UnlikeReplicasError: another replica's comes to a further layer.
        """
        self.tell("the end of its backward", self._end)
        self.read()

    def on_parts(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A step that is tried on parts of a batch, on all replicas at once.

        Args:
            call: the step; if it fails, only the trial does.

        Returns:
            The same, which raises :class:`UnlikeReplicasError` where it fails on some of the replicas.
        """

        def ended(part: Any) -> Any:
            try:
                output = call(part)
            except Exception as error:
                if not (isinstance(error, RemoteFailure | UnlikeReplicasError) or is_echo(error)):
                    self._left_by(error)
                raise
            self.tell("the end of a part of its batch", self._end)
            return output

        return ended

    def _left_by(self, error: Exception) -> None:
        self.tell("the end of a part of its batch", self._end)
        try:
            self.read()
        except UnlikeReplicasError:
            raise UnlikeReplicasError(
                f"the step fails on a part of one replica's batch, and not on those of others: {type(error).__name__}: "
                f"{error}. `weight_sharding=True` gathers a layer's weights when it runs, so every replica must run "
                "the same layers; pass `whole_batch_loss=False`, which tries no parts, or `weight_sharding=False`."
            ) from error
