"""Calls of layers and parts in a training step, from their forwards to their backwards.

A call is one node of autograd's graph, on every stage. Where one micro-batch runs at a time, autograd runs the nodes,
and each waits for what its owner tells. Where micro-batches take turns nothing may wait inside of autograd, which has
one thread for each device: there nodes collect the gradients of their outputs, and calls go back one by one, the latest
first, each followed by the code of the step before it::

    loss ─▶ code ─▶ layer 1: collected │ layer 1 goes back ─▶ code ─▶ layer 0: collected │ layer 0 goes back ─▶ ...

Keys and values that a call leaves in a cache are read by a later call of the same layer, which the same stage computes.
Their gradients stay there: what is read begins the later call's graph, and its gradient waits for the earlier call's
backward. So that this comes, and on every stage, an empty number goes from call to call through autograd's graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_megatron.mesh.draws.one_stream import OneStream
from lightning_megatron.mesh.draws.random_streams import SegmentStreams
from lightning_megatron.pipeline.repeated.wire import Wire


class RunsCalls(Protocol):
    """The running step, as calls see it; see :class:`~.with_gradients.TrainingFollower`."""

    stage: int
    wire: Wire
    now: Pass
    computing: int
    reads: set[str]
    streams: SegmentStreams | OneStream

    def reach(self, owner: int) -> None:
        """Let other micro-batches run before another stage computes."""

    def resume(self, at: tuple[int, int, int]) -> None:
        """Let a recomputation in the backward draw the same random numbers as its forward."""


@dataclass
class Pass:
    """The user's step on a micro-batch.

    Attributes:
        micro_batch: its number.
        counts: by layer, how often it was called.
        differentiates: whether the backward of the step runs.
        calls: to which gradients go back, in their order, where other micro-batches run meanwhile.
        left: by layer, what its calls have left in caches.
    """

    micro_batch: int
    counts: dict[int, int] = field(default_factory=dict)
    differentiates: bool = False
    calls: list[ToldCall] = field(default_factory=list)
    left: dict[int, list[LeftInCache]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class LeftInCache:
    """Keys and values that the latest call of a layer has left in a cache.

    Attributes:
        call: that call.
        cache: as this stage has it.
        layers: entries of the cache that it, or an earlier one, has added to.
        token: the empty number that the next call takes from it.
    """

    call: ToldCall
    cache: Any
    layers: tuple[Any, ...]
    token: Tensor


def left_by(
    call: ToldCall, token: Tensor, read: Sequence[LeftInCache], added: Sequence[tuple[Any, Any]]
) -> list[LeftInCache]:
    """One for each cache that a call has read or added to.

    Args:
        call: the latest.
        token: of it.
        read: what earlier calls had left.
        added: caches, each with an entry that the call has added to.
    """
    entries = [(one.cache, layer) for one in read for layer in one.layers] + list(added)
    caches = {id(cache): cache for cache, _ in entries}
    layers = {at: {id(layer): layer for cache, layer in entries if id(cache) == at} for at in caches}
    return [LeftInCache(call, cache, tuple(layers[at].values()), token) for at, cache in caches.items()]


class ToldCall:
    """A call of a layer or part, from its forward until its backward.

    Args:
        follower: answers it.
        name: of what is called.
        unit: its number.
        owner: stage that computes it.
        at: micro-batch, segment and number of the call, for random streams.
    """

    def __init__(self, follower: RunsCalls, name: str, unit: int, owner: int, at: tuple[int, int, int]) -> None:
        self._follower, self.name, self.unit, self.owner, self.at = follower, name, unit, owner, at
        self._starts: list[Tensor] = []
        self._taken: list[tuple[Tensor, int]] = []
        self.outputs: list[Tensor] | None = None
        self._inputs: list[Tensor] = []
        self._collected: list[Tensor | None] | None = None
        self._read: list[tuple[ToldCall, Tensor, Tensor]] = []
        self._owed: list[tuple[Tensor, Tensor]] = []
        self.gives_token, self._tokens = False, 0

    def takes(self, given: list[Any]) -> list[Any]:
        """Arguments for the owner to compute with: its graph begins at them, and each may be written into."""
        self._taken = [(leaf, leaf._version) for leaf in given if isinstance(leaf, Tensor)]
        if not torch.is_grad_enabled():
            return given
        starts: dict[int, Tensor] = {}
        taken = []
        for leaf in given:
            if goes_back(leaf) and id(leaf) not in starts:
                start = leaf.detach().requires_grad_()
                self._starts.append(start)
                starts[id(leaf)] = start.clone() if self.name not in self._follower.reads else start
                self._taken.append((starts[id(leaf)], starts[id(leaf)]._version))
            elif goes_back(leaf):
                self._starts.append(self._starts[list(starts).index(id(leaf))])
            taken.append(starts.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf)
        return taken

    def check_written(self) -> None:
        """Refuse a call that writes into its arguments: other stages' copies would keep the old values."""
        if any(tensor._version != version for tensor, version in self._taken):
            raise RuntimeError(
                f"`{self.name}` writes into its input (an `inplace=True`, `x += ...`), of which other pipeline stages "
                "have copies, in a training step that calls the layers more than once. Let it write into a tensor of "
                "its own, or use `pipeline_parallel_size=1`."
            )
        self._taken = []
        self._follower.reads.add(self.name)

    def reads_left(self, left: Sequence[LeftInCache]) -> None:
        """Begin the owner's graph at keys and values that earlier calls have left."""
        for one in left:
            for layer in one.layers:
                for name in ("keys", "values"):
                    tensor = getattr(layer, name, None)
                    if isinstance(tensor, Tensor) and tensor.requires_grad:
                        start = tensor.detach().requires_grad_()
                        setattr(layer, name, start)
                        self._read.append((one.call, tensor, start))

    def gives(self, outputs: list[Tensor], tokens: int, *, leaves: bool) -> None:
        """Keep the outputs whose gradients will arrive.

        Args:
            outputs: of the call.
            tokens: how many empty numbers it takes, after its arguments.
            leaves: whether it gives one, after its outputs.
        """
        self.outputs, self._tokens, self.gives_token = outputs, tokens, leaves

    def collects(self, inputs: list[Tensor]) -> None:
        """Wait for all gradients of the outputs, after which those of the inputs go on: no stage waits in autograd."""
        self._inputs, self._collected = inputs, [None] * (len(self.outputs or ()) + self.gives_token)

    def arrive(self, gradients: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Gradients of the outputs have come; gives those of the arguments, unless they go on later.

        Raises:
            RuntimeError: it is not the backward of the step's loss that runs.
        """
        if not self._follower.now.differentiates or torch.is_grad_enabled() or self.outputs is None:
            _refuse_gradient(self.name)
        if self._collected is None:
            return [*self.backward(gradients), *self._empty()]
        for place, gradient in enumerate(gradients):
            before = self._collected[place]
            self._collected[place] = before if gradient is None else gradient if before is None else before + gradient
        return []

    def go_back(self) -> None:
        """Let gradients go on from a call whose outputs get no more."""
        collected, inputs = self._collected or [], self._inputs
        self._collected, self._inputs = None, []
        if all(gradient is None for gradient in collected):
            return
        self._follower.reach(self.owner)
        with torch.no_grad():
            found = [*self.backward(tuple(collected)), *self._empty()]
        pairs = [(one, gradient) for one, gradient in zip(inputs, found, strict=True) if gradient is not None]
        if pairs:
            torch.autograd.backward([one for one, _ in pairs], [g for _, g in pairs], retain_graph=True)

    def _empty(self) -> list[Tensor]:
        return [torch.zeros(()) for _ in range(self._tokens)]

    def backward(self, gradients: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Gradients of the arguments: computed by the owner, heard by the others."""
        follower = self._follower
        outputs, self.outputs = self.outputs, None
        streams = follower.streams
        if follower.stage != self.owner:
            found, drawn = follower.wire.hear(self.owner, self.unit, self.name, [])
            if drawn is not None:
                streams.go_to(drawn)
            return [found] if isinstance(found, Tensor) else list(found)
        follower.resume(self.at)
        arrived = zip(outputs or (), gradients[: len(outputs or ())], strict=True)
        pairs = [(one, gradient) for one, gradient in arrived if gradient is not None] + self._owed
        position = streams.position()
        follower.computing += 1
        try:
            if pairs:
                torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
        finally:
            follower.computing -= 1
        for earlier, tensor, start in self._read:
            if start.grad is not None:
                earlier._owed.append((tensor, start.grad))
        self._read, self._owed = [], []
        starts, self._starts = self._starts, []
        first = {id(start): place for place, start in reversed(list(enumerate(starts)))}
        grads = [start.grad if first[id(start)] == place else None for place, start in enumerate(starts)]
        alone = len(grads) == 1 and grads[0] is not None
        drawn = None if streams.segmented else streams.drawn_since(position)
        follower.wire.tell(self.unit, grads[0] if alone else grads, drawn, [])
        return grads


class CallNode(torch.autograd.Function):
    """The node of a call, on every stage."""

    @staticmethod
    def forward(ctx: Any, call: ToldCall, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.told = call
        ctx.set_materialize_grads(False)
        token = (torch.zeros(()),) if call.gives_token else ()
        return *(output.detach() for output in call.outputs or ()), *token

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.told.arrive(gradients))


def goes_back(leaf: Any) -> bool:
    """Whether gradients go back through a leaf of what a call is given, or gives."""
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _refuse_gradient(name: str) -> None:
    raise RuntimeError(
        f"a training step that calls the layers more than once takes a gradient through `{name}` itself "
        "(`torch.autograd.grad`, `.backward()`, `create_graph=True`, or one backward through a graph twice). Under a "
        "pipeline gradients go back once, in the backward of the loss that the step returns. Return the loss, or use "
        "`pipeline_parallel_size=1`."
    )
