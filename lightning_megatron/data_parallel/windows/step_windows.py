"""Opens and closes the windows of layers along a training step.

::

    forward     F0 opens 0, closes 0 │ F1 opens 1, closes 1 │ ...
    backward    ... │ B1 opens 1 │ B0 opens 0             the two windows used last stay open
    meanwhile   the next window of the step before is gathered, once another one has been closed
    evaluation  as forward, where it runs the same layers on all replicas
    between     all closed; whole while something asks for the weights, such as a hook

In a backward a window is opened by the gradient of the layer's output, by autograd where it reads a weight that it has
saved, and by the layer's forward where that is recomputed. Code that uses a layer's weights without calling the layer
finds them whole, and the window then stays open to the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

from lightning_megatron.data_parallel.buckets.bucket import Bucket
from lightning_megatron.data_parallel.buckets.buckets import GradientBuckets
from lightning_megatron.data_parallel.windows.agreement import Agreement
from lightning_megatron.data_parallel.windows.ahead import Ahead
from lightning_megatron.data_parallel.windows.freeing import Freeing
from lightning_megatron.data_parallel.windows.openers import Openers
from lightning_megatron.data_parallel.windows.sharded_weights import ShardedWeights
from lightning_megatron.data_parallel.windows.spread import Spread
from lightning_megatron.data_parallel.windows.window import Window
from lightning_megatron.mesh.autograd import in_backward


class StepWindows:
    """The windows of this rank's layers.

    Args:
        module: holds the layers; their forwards are wrapped until :meth:`close`.
        spread: the parameters of the windows.
        buckets: those of the trained parameters, whose weights lie apart.
        frozen: buckets of the others, which have no gradients.
        asked: the user's choice of when windows close and gradients are summed; ``None`` for the defaults.
        reads_in_step: whether code outside of layers may look at weights between a step's forward and its backward.
        reads_weights: whether it may look at them between steps.

    Attributes:
        windows, agreement: in the order of the layers, and what the replicas tell each other of them.
        freeing: decides whether windows stay open to the end of a step.
        active: whether a training step is under way, outside of which no window opens by itself.
        left_spread: what was lacking for whole weights after the last step; "" where they are whole.
    """

    closes = True

    def __init__(
        self,
        module: nn.Module,
        spread: Spread,
        buckets: GradientBuckets,
        frozen: Sequence[Bucket] = (),
        asked: ShardedWeights | None = None,
        reads_in_step: bool = False,
        reads_weights: bool = False,
    ) -> None:
        asked = asked or ShardedWeights()
        self._ahead, self._evaluated, self._sums = Ahead(), Ahead(), asked.sums == "micro_batch"
        self._stays_whole, self._looks_before_backward = reads_in_step or reads_weights, reads_in_step
        self._buckets = buckets
        trained = [bucket for bucket in buckets.buckets if bucket.lies_apart]
        self.agreement = Agreement([*trained, *frozen], len(spread.modules), buckets)
        self.windows = [
            Window(
                name,
                number,
                [bucket for bucket in trained if spread.trained[bucket.names[0]] == name],
                [bucket for bucket in frozen if spread.frozen[bucket.names[0]] == name],
                self.agreement,
            )
            for number, name in enumerate(spread.modules)
        ]
        self.freeing = Freeing(asked.free, self.windows)
        self._recent: list[Window] = []
        self._behind = False  # a backward, or still before it
        self.active, self.left_spread = False, ""
        self._opened: dict[int, int] = {}
        self._openers = Openers(module, self)
        for window in self.windows:
            self._openers.add(window, spread.modules[window.name])
        self._most_recent = 1 + self._openers.most
        buckets.on_arrival, buckets.launches.on_end = self._check, self._end_backward

    def close(self) -> None:
        """Leave the layers' forwards as they were; the windows stay as they are."""
        self.active, self._buckets.on_arrival, self._buckets.launches.on_end = False, None, None
        self._openers.remove()

    def show_all(self) -> None:
        """Make all weights whole, until the next training step; collective over the replicas."""
        self.active, self._recent = False, []
        for window in self.windows:
            window.open()

    def show_if_room(self) -> str:
        """Make all weights whole if every replica has memory for them; collective over the replicas.

        Returns:
            What they need and what is free, if they stay spread; else "".
        """
        self.left_spread = self.freeing.lacks(window for window in self.windows if not window.is_open)
        if not self.left_spread:
            self.show_all()
        return self.left_spread

    def _hide_all(self) -> None:
        self._recent = []
        for window in self.windows:
            window.close()

    @property
    def place(self) -> str | None:
        """How far this rank has come, equal on replicas that made the same collectives; ``None`` if all is whole."""
        if all(window.is_open for window in self.windows):
            return None
        if self.agreement.failed:
            return f"not with others {dist.get_rank()}"
        under_way = [window.number for window in self.windows if window.coming]
        return (
            f"{sum(window.opened for window in self.windows)} {under_way} {[b.launched for b in self._buckets.buckets]}"
        )

    @property
    def stays_spread(self) -> bool:
        """Whether weights stay spread between steps, as no code looks at them there."""
        return not self._stays_whole

    def spread_place(self, parameter: nn.Parameter) -> tuple[Bucket, int] | None:
        """Location of a parameter of which this rank now has only its shard: its bucket, and its index there."""
        window = self._openers.window_of(parameter)
        if window is None or window.is_open:
            return None
        places = ((b, [id(p) for p in b.parameters]) for b in window.buckets)
        return next(((b, members.index(id(parameter))) for b, members in places if id(parameter) in members), None)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a training step up to its backward, or, where it runs that itself, to its end."""
        for window in self.windows:
            window.let_go_of_unfrozen()
        self._hide_all()
        self._opened = {id(window): window.opened for window in self.windows}
        self._ahead.begin()
        self.freeing.begin()
        self.active = True
        self._buckets.pace(not self.freeing.keeps)
        with self._openers.watched():
            yield
        if self._looks_before_backward:
            self.hold_all()

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Around a trial within a step, forward only, whose layers open in an order of its own."""
        ahead, self._ahead, self._behind = self._ahead, Ahead(), False
        with self.freeing.paused():
            yield
        self._ahead = ahead
        for window in self.windows:
            if not (window.held or self.freeing.keeps):
                self._forget(window)
                window.close()

    @property
    def opens_in_evaluation(self) -> bool:
        """Whether weights are spread now, and there is no reason to make all of them whole for a step of evaluation."""
        return self.stays_spread and not (self.freeing.keeps or self.active) and self.place is not None

    def are_equal(self, number: int) -> bool:
        """Whether a number is the same on all replicas that share the weights of a window; collective over them."""
        return len(set(self.freeing.everywhere(number))) < 2

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around a step of evaluation, in which layers open and close as in a forward, the same on all replicas."""
        self._hide_all()
        ahead, self._ahead, self.active, self._behind = self._ahead, self._evaluated, True, False
        self._ahead.begin()
        try:
            with self._openers.watched():
                yield
        finally:
            self.active, self._ahead = False, ahead
        self.agreement.read()
        self._hide_all()

    def hold_all(self) -> None:
        """Make all weights whole, to the end of the step; collective over the replicas."""
        for window in self.windows if self.active else ():
            self._hold(window)
        self._buckets.pace(False)

    def end_step(self) -> str:
        """Once the step's last backward has run: close all windows, or show all weights to code that may look.

        Returns:
            A description of when later steps free weights, if this step has settled that.
        """
        if not self.active:
            return ""
        self.agreement.read()
        self.active, before = False, self.freeing.chosen
        self.freeing.end(updates=self._buckets.reduces)
        if self._stays_whole:
            self.show_all()
        else:
            self._hide_all()
        return self.freeing.chosen if self.freeing.chosen != before else ""

    def _end_backward(self) -> None:
        """Refuse that another replica still gathers, where those sums start that have not been agreed on."""
        if self.active and self._buckets.launches.paced:
            self.agreement.end_backward()

    def _check(self, bucket: Bucket, index: int) -> None:
        """Refuse a gradient of a weight that was hidden all along, as what used it has told nobody."""
        window = self._openers.window_of(bucket.parameters[index]) if bucket.lies_apart else None
        if window is not None and self.active and window.opened == self._opened.get(id(window)):
            raise RuntimeError(
                f"`{bucket.names[index]}` was used in a function that torch does not report, without a call of the "
                f"module that holds it, so that its values were not there (`weight_sharding=True`); call "
                f"`{window.name}`, or pass `weight_sharding=False`."
            )

    def _hold(self, window: Window) -> None:
        self.open(window)
        window.held = True

    def open(self, window: Window) -> None:
        """Make a window's weights whole, in a step."""
        if self._behind and not window.is_open and not in_backward():  # the next micro-batch's forward
            self._release(len(self._recent))
            self._behind = False
        if not (window.is_open or window.coming):  # another one was gathered ahead: the step goes another way
            for other in (other for other in self.windows if other.coming):
                other.close()
        if not window.is_open:
            window.open()
            self._ahead.opened(window)

    def gather_ahead(self) -> None:
        """Begin to gather the window that opens next."""
        if (following := self._ahead.next) is not None and not any(window.coming for window in self.windows):
            following.start()

    def leave(self, window: Window) -> None:
        """Called when the layer's forward has run; in a recomputation, its backward follows."""
        if in_backward():
            self.need(window)
            return
        self.freeing.ran(window)
        if window.held or self.freeing.keeps:
            return
        if self._ahead.next is window:  # its backward follows
            self._ahead.opened(window)
            self._use(window)
            self._behind = False
        else:
            self._forget(window)
            window.close()

    def need(self, window: Window) -> None:
        """Open a window in a backward, and close the one that was needed longest ago."""
        if not self.active or window.held:
            return
        self._behind = True
        self.open(window)
        self.freeing.look()
        self._use(window)

    def _use(self, window: Window) -> None:
        self._forget(window)
        self._recent.append(window)
        self._release(len(self._recent) - self._most_recent)
        self.gather_ahead()

    def _release(self, count: int) -> None:
        """Close the windows that were needed longest ago."""
        for _ in range(count):
            oldest = self._recent.pop(0)
            if self._sums:
                oldest.agree()
                self._buckets.add_up(oldest.trained)
            if not (oldest.held or self.freeing.keeps):
                oldest.close()

    def _forget(self, window: Window) -> None:
        self._recent = [other for other in self._recent if other is not window]
