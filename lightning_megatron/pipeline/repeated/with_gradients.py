"""Several passes through the layers in one training step: gradients go back call by call, on every stage.

Every stage runs all of the step on real numbers, as in :mod:`.follower`: whoever has a layer or a part computes it and
tells the others. So every stage computes the loss, and autograd has the same graph everywhere, in which each call is a
single node; what is inside of the node only its owner has. Autograd runs nodes in the reverse order of their making,
which is one order on all stages::

    stage 0   embed ─▶ layer 0 ─▶ (layer 1) ─▶ loss ─▶ (layer 1: heard) ─▶ layer 0: computed, told ─▶ embed
    stage 1   (embed) ─▶ (layer 0) ─▶ layer 1 ─▶ loss ─▶ layer 1: computed, told ─▶ (layer 0: heard) ─▶ (embed)

A call may thus depend on any call before it, be frozen, or run without gradients. What all stages compute alike, a
parameter used between calls for instance, would count once for each: its gradient is taken from its first holder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_megatron.layers.whole.base import WholeTensor
from lightning_megatron.mesh.autograd import graph_behind, in_backward
from lightning_megatron.mesh.draws.one_stream import OneStream
from lightning_megatron.mesh.draws.random_streams import SegmentStreams
from lightning_megatron.mesh.key_value_caches import is_cache
from lightning_megatron.mesh.parts.names import owner_and_leaf
from lightning_megatron.pipeline.elsewhere.away import Away, StageSource, plain, refuse_away, source_of
from lightning_megatron.pipeline.elsewhere.effects import Effect
from lightning_megatron.pipeline.elsewhere.presence import Presence
from lightning_megatron.pipeline.elsewhere.undo import Snapshot
from lightning_megatron.pipeline.repeated.caches import Caches
from lightning_megatron.pipeline.repeated.follower import CallFollower, Note
from lightning_megatron.pipeline.repeated.told_calls import CallNode, LeftInCache, Pass, ToldCall, goes_back, left_by
from lightning_megatron.pipeline.stage.calls import InnerCall, LayerCall
from lightning_megatron.pipeline.stage.cursor import StageCursor

_OUTSIDE = -1  # segment of a call that draws from the stream of the code around it


class TrainingFollower(CallFollower):
    """A :class:`CallFollower` for a training step.

    Attributes:
        now: what runs.
        answers: whether a call is answered, which only one stage computes.
        waits: called where the step waits for another stage, in a trial.
        computing: how many backwards of calls run here.
        reads: names of what has left its arguments as they were.
        streams: what the step draws from.
    """

    recomputes = True
    computing = 0
    waits: Callable[[], None] | None = None
    streams: SegmentStreams | OneStream

    def prepare(self, presence: Presence, cursor: StageCursor, streams: SegmentStreams | OneStream) -> None:
        """Called before each step.

        Args:
            presence: what of the module is on this rank.
            cursor: told while code before the layers runs, whose parts draw from streams of their own.
            streams: random streams per segment, or the only one.
        """
        self._presence, self._cursor, self.streams = presence, cursor, streams
        self._wants: dict[int, tuple[int, ...]] = {}
        self.now = Pass(0)
        self._owner, self.answers = -1, False
        self.reads: set[str] = set()
        self._mine: set[int] = set()
        self._lent: list[tuple[nn.Module, str, Any]] = []

    @contextmanager
    def counting_once(self) -> Iterator[None]:
        """Around a step: of parameters that several stages hold, what all of them compute alike counts once."""
        handles = []
        for name, parameter in self._module.named_parameters():
            entry = self._presence.entries.get(name)
            stages = entry.stages if entry is not None else frozenset((self.stage,))
            if min(stages, default=self.stage) == self.stage:
                self._mine.add(id(parameter))
            elif self.stage in stages and parameter.requires_grad:
                handles.append(parameter.register_hook(self._of_calls_only))
        try:
            yield
        finally:
            self._cursor.outside = None
            for owner, leaf, absent in self._lent:
                owner.__dict__[leaf] = absent
            for handle in handles:
                handle.remove()

    def lend(self) -> None:
        """Let every stage have the numbers of the parameters that user code may use by themselves, for this step."""
        for name in sorted(self._units):
            (owner, leaf), stages = owner_and_leaf(self._module, name), self._units[name]
            if leaf in owner._modules or len(stages) == len(set(self._owners)):
                continue
            unit, first = self._numbers[name], min(stages)
            if first == self.stage:
                tensor = getattr(owner, leaf)
                self.wire.tell(unit, tensor.detach(), Note((), None, None, (0,) * int(tensor.requires_grad)), [])
                continue
            number, note = self.wire.hear(first, unit, name, [])
            if self.stage not in stages and leaf in owner.__dict__:
                self._lent.append((owner, leaf, owner.__dict__[leaf]))
                owner.__dict__[leaf] = number.requires_grad_(bool(note.wants))

    def _of_calls_only(self, gradient: Tensor) -> Tensor:
        return gradient if self.computing else torch.zeros_like(gradient)

    def begin(self, micro_batch: int) -> None:
        """Prepare for the user's step on a micro-batch."""
        self.now = Pass(micro_batch)
        self._cursor.outside = micro_batch if self.streams.segmented else None
        self.streams.enter_micro_batch(micro_batch)

    def backward(self, loss: Tensor, scale: float) -> None:
        """The backward of a loss, which all stages run at once."""
        self._cursor.outside = None
        self._check_path("the loss", [loss])
        loss, now = plain(loss), self.now
        now.differentiates = True
        try:
            scales = torch.full_like(loss, scale, requires_grad=False)
            torch.autograd.backward(loss, scales, retain_graph=self.groups is not None)
            while now.calls:
                now.calls.pop().go_back()
        finally:
            now.differentiates = False
            now.calls.clear()
            now.left.clear()

    def reach(self, owner: int) -> None:
        """See :meth:`CallFollower.reach`; other micro-batches run in between."""
        if self.waits is not None and owner != self._owner:
            self.waits()
        self._owner = owner
        if self.groups is not None:
            now, outside = self.now, self._cursor.outside
            super().reach(owner)
            self.now, self._cursor.outside = now, outside

    def call_inside(self, index: int, call: InnerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`~..stage.calls.Follower`."""
        self._cursor.outside = None
        return self._answer(call.sentinel.name, index, self._owners[index], self._on_rows(call), args, kwargs)

    def call_unit(self, name: str, runs: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`CallFollower`."""
        return self._answer(name, self._numbers[name], min(self._units[name]), runs, args, kwargs)

    def call_layer(self, index: int, call: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`~..stage.calls.Follower`."""
        name, owner, last = call.sentinel.name, self._owners[index], len(self._owners) - 1
        if self.inside or in_backward():
            return self._answer(name, index, owner, self._on_rows(call), args, kwargs)
        self._cursor.outside = None
        output = self._answer(name, index, owner, self._on_rows(call), args, kwargs, 1 + index)
        now = self.now
        now.counts[index] = now.counts.get(index, 0) + 1
        if index == last:
            self.streams.enter(now.micro_batch, 2 + index, now.counts[index] - 1)
        return output

    def _on_rows(self, call: LayerCall) -> Callable[..., Any]:
        """Computes a layer: of tokens that context ranks share, this rank's; it is given all, and what it gives is
        gathered."""
        tokens, runs = self._cursor.tokens, call.runs
        if tokens is None:
            return runs

        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tokens.enter(call.module, args, kwargs)
            output = runs(*args, **kwargs)
            tokens.leave(call.module)
            return output

        return run

    def _answer(
        self,
        name: str,
        unit: int,
        owner: int,
        runs: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        segment: int = _OUTSIDE,
    ) -> Any:
        """Compute a call where it can be, and tell the others what it gave."""
        if in_backward():  # checkpointing of the user's own: it recomputes what only the owner has kept
            return self._run_again(unit, runs, args, kwargs)
        if self.inside:
            return self._everywhere(name, unit, owner, runs, args, kwargs)
        self.reach(owner)
        with self._answering():
            call = ToldCall(self, name, unit, owner, (self.now.micro_batch, segment, self.now.counts.get(unit, 0)))
            caches = Caches(args, kwargs, name)
            given, spec = pytree.tree_flatten((args, kwargs), is_leaf=is_cache)
            inputs = [leaf for leaf in given if goes_back(leaf)] if torch.is_grad_enabled() else []
            left = [one for one in self.now.left.get(unit, ()) if caches.has(one.cache) and torch.is_grad_enabled()]
            if owner == self.stage:
                call.reads_left(left)
                output, note = self._computed(call, runs, given, spec, caches)
                known = note.grown == () and note.left is None and note.position is None
                known = known and self._wants.get(unit) == note.wants
                told = pytree.tree_map(_numbers, output, is_leaf=is_cache)
                self.wire.tell(unit, told, None if known else note, caches.found)
            else:
                self._check_path(f"an argument of `{name}`", inputs)
                output, note = self.wire.hear(owner, unit, name, caches.found)
                if note is not None:
                    self._take(note, caches, output, args, kwargs)
            wants = self._wants[unit] = note.wants if note is not None else self._wants[unit]
            leaves, out = pytree.tree_flatten(output, is_leaf=is_cache)
            if wants:
                added = caches.added_to(note.grown) if note is not None else []
                call.gives([leaves[place] for place in wants], len(left), leaves=bool(left or added))
                for place, tensor in zip(wants, self._node(call, inputs, left, added), strict=False):
                    leaves[place] = tensor
            return pytree.tree_unflatten(leaves, out)

    def _node(
        self, call: ToldCall, inputs: list[Tensor], left: list[LeftInCache], added: list[tuple[Any, Any]]
    ) -> tuple[Tensor, ...]:
        """Tensors that a call gives, behind its node of autograd's graph."""
        inputs, now = [*map(plain, inputs), *(one.token for one in left)], self.now
        if self.groups is not None:
            call.collects(inputs)
            now.calls.append(call)
            inputs = []
        given: tuple[Tensor, ...] = CallNode.apply(call, torch.empty(0, requires_grad=True), *inputs)
        if call.gives_token:
            others = [one for one in now.left.get(call.unit, ()) if not any(one is read for read in left)]
            now.left[call.unit] = others + left_by(call, given[-1], left, added)
        return given

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Around the answer of a call; where it fails, on one stage only, it is still being answered."""
        self.answers = True
        yield
        self.answers = False

    def _computed(
        self, call: ToldCall, runs: Callable[..., Any], given: list[Any], spec: Any, caches: Caches
    ) -> tuple[Any, Note]:
        """Result of a call here, with a graph that begins at its arguments, and the note for the other stages."""
        name, unit, streams = call.name, call.unit, self.streams
        refuse_away(given, f"an argument of `{name}`")
        args, kwargs = pytree.tree_unflatten(call.takes(given), spec)
        containers = self._effects.containers(unit, name, *caches.bare(args, kwargs))
        before, lengths, position = Snapshot(containers), caches.lengths(), streams.position()
        apart = call.at[1] != _OUTSIDE and streams.segmented
        if apart:
            streams.enter(*call.at)
        self.inside = name
        try:
            output = runs(*args, **kwargs)
        finally:
            self.inside = ""
        drawn = None if apart else streams.drawn_since(position)
        if apart:
            streams.go_to(position)
        found = [Effect.of(unit, change) for change in before.compare()]
        if any(_has_graph(effect.value) for effect in found):
            _refuse_graph(name)
        call.check_written()
        output = pytree.tree_map(lambda leaf: leaf.full() if isinstance(leaf, WholeTensor) else leaf, output)
        leaves = pytree.tree_leaves(output, is_leaf=is_cache)
        wants = tuple(place for place, leaf in enumerate(leaves) if goes_back(leaf))
        return output, Note(caches.grown(lengths), self._effects.packed(found), None, wants, drawn)

    def _take(self, note: Note, caches: Caches, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do here what a call on another stage did besides giving something."""
        x = next((leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)), torch.empty(1))
        self._follow(note, caches, x, args, kwargs)
        if note.position is not None:
            self.streams.go_to(note.position)

    def _run_again(self, unit: int, runs: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._at[1] == 1 + unit:
            self.streams.enter(*self._at)
        return runs(*args, **kwargs)

    def resume(self, at: tuple[int, int, int]) -> None:
        """Let a recomputation in the backward draw the same random numbers as its forward."""
        self._at = at

    def _check_path(self, what: str, tensors: Iterable[Tensor]) -> None:
        """Complain if a gradient would go on here through numbers that this stage lacks.

        Where they only lead to calls of other stages it does no harm: those tell what their gradients are.

        Raises:
            RuntimeError: they lead to a call of this stage, or to a parameter whose gradient is taken from here.
        """
        away = [tensor for tensor in tensors if tensor.__class__ is Away]
        for node in graph_behind((tensor.grad_fn for tensor in away), lambda node: hasattr(node, "told")):
            call = getattr(node, "told", None)
            if getattr(call, "owner", None) == self.stage or id(getattr(node, "variable", None)) in self._mine:
                source = source_of(away) or StageSource(what)
                raise RuntimeError(
                    f"{what}, in a training step that calls the layers more than once, depends on `{source.name}`, "
                    "which another pipeline stage has, and on what this stage computes, whose gradient would need "
                    f"its numbers. {source.remedy()}"
                )


def _numbers(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _has_graph(value: Any) -> bool:
    return any(goes_back(leaf) for leaf in pytree.tree_leaves(value))


def _refuse_graph(name: str) -> None:
    raise RuntimeError(
        f"`{name}` leaves a tensor with a gradient behind (on a module, in a list) in a training step that calls the "
        "layers more than once; only its own pipeline stage has the gradient's path. Return it from the layer and pass "
        "it through the layers, detach it, or use `pipeline_parallel_size=1`."
    )
