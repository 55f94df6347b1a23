"""Following the user's step through the layers, call by call.

The step is not rewritten. It runs as it is, on one micro-batch, over a module whose layers have been wrapped::

    def training_step(self, batch):          layers  0   1 │ 2   3 │ 4   5
        x = self.embed(batch)                        └───────────────────── this stage runs 2 and 3
        for layer in self.layers:            0, 1    skipped: stand-in output
            x = layer(x, mask)               2       its first argument is replaced by what stage 0 sent
        return loss(self.head(x), batch)     4       its first argument is sent on, and the step ends here

A :class:`StageCursor` follows the layer calls of one run and does the replacing, skipping and ending.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_megatron.mesh.autograd import graph_task, in_backward, version_of
from lightning_megatron.mesh.draws.random_streams import SegmentStreams
from lightning_megatron.mesh.draws.segment_hooks import PartHooks
from lightning_megatron.mesh.key_value_caches import in_caches, with_own_caches
from lightning_megatron.pipeline.elsewhere.away import (
    STATE,
    Away,
    forget_written,
    refuse_away,
    refuse_away_metrics,
    refuse_late_write,
)
from lightning_megatron.pipeline.elsewhere.effects import lasts
from lightning_megatron.pipeline.elsewhere.provenance import Provenance, TracePlan
from lightning_megatron.pipeline.elsewhere.standin import become
from lightning_megatron.pipeline.stage import order, trunk_output
from lightning_megatron.pipeline.stage.arguments import flatten, made_by_layers, other_tensors, same_nests
from lightning_megatron.pipeline.stage.boundary import Boundary, StageRun
from lightning_megatron.pipeline.stage.calls import AnswersLayers, FirstCall, InnerCall, LayerCall, PartCall
from lightning_megatron.pipeline.stage.crossed import Crossed
from lightning_megatron.pipeline.stage.final_state import trains
from lightning_megatron.pipeline.stage.side_effects import SideEffects
from lightning_megatron.pipeline.stage.split_tokens import SplitsTokens, become_split, boundary_of
from lightning_megatron.pipeline.stage.stand_ins import StandIns, note


class StageCursor:
    """Follows the layer calls of one run of the user's step on one virtual stage.

    Invariants: layers ``first`` to ``stop - 1`` compute, in order and once each; those before them return stand-ins;
    the call of layer ``stop`` fills ``sent`` and raises `StageDone`. `end` drops all references to the micro-batch.

    Raises:
        RuntimeError: the layers are called twice, out of order, or not at all.
    """

    def __init__(self, layers: int, trunk: str, streams: SegmentStreams, side_effects: SideEffects) -> None:
        self._layers, self._trunk, self._streams = layers, trunk, streams
        self.side_effects, self.trace_plan = side_effects, TracePlan()
        self._writers: set[tuple[int, int]] = set()
        self._tracer: Provenance | None = None
        self._crossed = Crossed()
        self.stand_ins = StandIns(side_effects.device)
        self.tokens: SplitsTokens | None = None
        self.running = self.recomputes = False
        self.passes: AnswersLayers | None = None  # asked about layers instead, while a step runs its own backwards
        self.tells_always = False  # with each boundary, what calls have returned, and not only for new shapes
        self.computes_parts = True  # those before the layers are called as in one process, and nobody needs to know
        self.parameters_read = False  # all that this stage holds of a module were gone over since the last step
        self.outside: int | None = None  # before the layers, where something else follows the step: its micro-batch
        self._next = self.first = 0
        self.earlier: list[tuple[str, Tensor]] = []  # weights that earlier stages have as well, with their parts
        self._versions: list[int] = []

    def isolate_parts(self, parts: list[nn.Module]) -> None:
        """Let ``parts``, those outside the trunk, draw from streams of their own where they run before it."""
        self._parts = PartHooks(parts, self._streams, self._before_trunk)

    def _before_trunk(self) -> int | None:
        return self.micro_batch if self.running and self._next <= 0 else self.outside

    def use_streams(self, streams: SegmentStreams) -> None:
        """Draw from other streams from now on: a later run's."""
        self._streams = streams
        self._parts.use_streams(streams)

    def begin(
        self,
        bounds: tuple[int, int],
        micro_batch: int,
        received: Boundary,
        where: str,
        tracer: Provenance | None = None,
        *,
        trunk_only: bool = False,
        called: int = 0,
    ) -> None:
        """Prepare for one run of the layers ``bounds`` on ``received``.

        Args:
            bounds: first layer, and the one after the last.
            micro_batch: its number in the step.
            received: what the stage before sent.
            where: name of the step.
            tracer: follows the step's values, in the first run of its kind.
            trunk_only: end after the last layer.
            called: how many layers have been called before; `LEFT_OUT` where none may be.
        """
        self.first, self.stop = bounds
        self._starts, self._trunk_only, self._tracer = self.first == 0 and received.span is None, trunk_only, tracer
        self.where, self.training, self.recomputes = where, trains(where), where.startswith("training_step")
        self.side_effects.begin(bounds, where, micro_batch, received, tracer is not None)
        self.stand_ins.begin(received, tracer)
        self.computes_parts = self._starts and not self.side_effects.looks and not self.tells_always
        self.micro_batch, self.received, self.sent = micro_batch, received, Boundary()
        self._crossed.begin()
        self._next, self.running, self.parameters_read = called, True, False
        STATE.in_layers = called > 0
        ahead = range(1 + self.first, 2 + self.stop)
        self._streams.enter_micro_batch(micro_batch, ahead, whole=self.first == self.stop)

    def end(self) -> None:
        """Finish a run: nothing of the micro-batch stays referenced here."""
        self.running = STATE.in_layers = False
        self.side_effects.end()
        self.computes_parts = True
        if STATE.written:
            forget_written()
        if self.received.written:
            self._writers.add((self.first, self.stop))
        self.received = self.sent = Boundary()
        self._crossed.begin()
        if self._tracer is not None:
            self.trace_plan.note_run((self.first, self.stop), self.where)
            self._tracer = None

    def resume(self, bounds: tuple[int, int], run: StageRun) -> None:
        """Make layer calls during the backward of ``run`` (recomputation) see what its forward saw."""
        self.first, self.stop = bounds
        self.micro_batch, self.received = run.micro_batch, run.received
        self._streams.resume(run.micro_batch)

    def writes(self, bounds: tuple[int, int]) -> bool:
        """Whether the layers ``bounds`` have written into their input."""
        return bounds in self._writers

    @property
    def sends(self) -> bool:
        """Whether the present run ends by sending to another stage."""
        return self.stop < self._layers

    def check_output(self, output: Any, module: nn.Module) -> None:
        """Complain about a step whose results are made of stand-ins: its output, or the state of a metric; or that has
        written weights where other stages that have them had left it.
        """
        for (part, weight), version in zip(self.earlier, self._versions, strict=False):
            if version_of(weight) > version:  # less, where a trial has taken everything back
                refuse_late_write(part)
        self.side_effects.note_finished()
        if type(output) is not Tensor:
            refuse_away(output, f"what `{self.where.split()[0]}` returned")
        if self._tracer is not None or STATE.written:
            refuse_away_metrics(module)

    def leaves_out(self) -> bool:
        """Whether the step ends before the layers here as on the stages before, and what follows is a first run yet."""
        if self._next != (order.LEFT_OUT if self.first else 0):
            return False
        self._tracer = None
        return True

    def check_finished(self, output: Any) -> None:
        """Complain about a step that returned ``output`` without having called every layer."""
        if self._next < self.stop or self.sends:
            order.refuse_end(self._trunk, self._next, self._layers, self.where, nothing=output is None)

    def call_layer(self, index: int, call: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand in for ``layer(*args, **kwargs)``; see the module's picture."""
        if self.passes is not None and not in_backward():
            return self.passes.call_layer(index, call, args, kwargs)
        if self.running and 0 < index < self.first - 1 and self._passes_on(index, call, args, kwargs):
            self._next += 1
            self._streams.leave(index)
            if self.received.effects is not None:
                self.side_effects.repeat(index, args, kwargs, None)
            return args[0]
        if graph_task() != -1:
            return self._recompute(index, call, args, kwargs)
        return self.follow(index, call, args, kwargs)

    def follow(self, index: int, call: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer the call of a layer in its turn."""
        if self._tracer is None:
            output = self._follow(index, call, args, kwargs)
        else:
            with self._tracer.paused():
                output = self._follow(index, call, args, kwargs)
        if index < self._layers - 1:
            self._streams.leave(index)
        return output

    def _passes_on(self, index: int, call: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a skipped layer, neither first nor last, may hand on its input: the usual case, so at once."""
        plain = index == self._next and self._tracer is None and not kwargs and len(args) == 1 and not in_backward()
        return plain and self.stand_ins.keeps(index, call, args[0])

    def _follow(self, index: int, call: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.running or index != self._next:
            order.refuse_layer(self._trunk, index, self._next, self.where if self.running else "")
        self._next += 1
        if not STATE.in_layers:
            STATE.in_layers, self._versions = True, [version_of(weight) for _, weight in self.earlier]
        if index < self.first:
            output = self.side_effects.repeat(index, args, kwargs, self._skip(index, call, args, kwargs))
            if index == self._layers - 1 and isinstance(self.received, trunk_output.JoinedBoundary):
                self._streams.enter_ahead(1 + self._layers)
                return trunk_output.given(output, self.received, call.sentinel.name)
            return output
        if index == self.stop:
            self._capture(call, args, kwargs)
        args, kwargs = self._substitute(index, args, kwargs)
        self._streams.enter_ahead(1 + index)
        output = note(self.stand_ins.noted.layers, index, self._compute(call, args, kwargs))
        crossed = self._crossed
        if type(output) is not Tensor or crossed.made:
            crossed.made = made_by_layers(crossed.made, (args, kwargs), output)
        if index == self._layers - 1:
            if self._trunk_only:
                luggage = self.side_effects.pack()
                leaves = luggage is not None and lasts(luggage.effects)
                self.sent = trunk_output.taken(output, call.sentinel.name, leaves=leaves)
                self.sent.forms = self.stand_ins.all_forms()
                raise order.StageDone
            self._streams.enter_ahead(1 + self._layers)
            if self.received.effects is not None:
                self.side_effects.finish_trunk()
        return output

    def is_inside(self, index: int) -> bool:
        """See :class:`~.calls.Follower`."""
        return self.running and self._next == index + 1

    def call_inside(self, index: int, call: InnerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A further call inside a layer that is a container."""
        place = self.stand_ins.number(index)
        if index < self.first:
            return self._skip(index, call, args, kwargs, place)
        if self._tracer is None:
            return note(self.stand_ins.noted.layers, place, call.runs(*args, **kwargs))
        with self._tracer.paused():
            return note(self.stand_ins.noted.layers, place, self._compute(call, args, kwargs))

    def _compute(self, call: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.tokens is None:
            return self._computed(call, args, kwargs)
        output = self._computed(call, *self.tokens.enter(call.module, args, kwargs))
        self.tokens.leave(call.module)
        return output

    def _computed(self, call: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._tracer is None:
            for value in (*args, *kwargs.values()) if kwargs else args:
                if value.__class__ is Away:
                    refuse_away(value, f"an argument of layer `{call.sentinel.name}`")
            if self.side_effects.looks:
                return self.side_effects.around(call.index, call.runs, args, kwargs)
            return call.runs(*args, **kwargs)
        refuse_away((args, kwargs, in_caches(args, kwargs)), f"an argument of layer `{call.sentinel.name}`")
        output = self.side_effects.around(call.index, call.runs, args, kwargs)
        self._tracer.note_made(output)
        return output

    def _skip(self, index: int, call: LayerCall, args: Any, kwargs: Any, inside: tuple[int, int] | None = None) -> Any:
        """Output of a layer before this stage's, or of a call inside it; the last one's will become the input."""
        args, kwargs = with_own_caches(args, kwargs)
        return self.stand_ins.of_layer(inside or index, call, args, kwargs, reuse=0 < index < self.first - 1)

    def call_part(self, call: PartCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand in for a part outside the trunk that another stage owns."""
        late = self._next > min(self.first, self._layers - (self.passes is None))  # passes go on after all layers
        if self.running and not in_backward() and (self.first == 0 or late):
            where = self.where if self._next == self._layers else ""
            order.refuse_part(self._trunk, call.sentinel.name, self._next, where, again=bool(where and self.passes))
        return self._stand_in_for_part(call, args, kwargs)

    def _stand_in_for_part(self, call: PartCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = self.stand_ins.of_part(call, args, kwargs)
        repeats = self.running and self.received.effects is not None
        return self.side_effects.repeat(call.index, args, kwargs, output) if repeats else output

    def call_first_part(self, call: FirstCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand in for a part that runs before the layers, on the stage that owns it."""
        if self.running and not self._starts and not in_backward():
            return self._stand_in_for_part(call, args, kwargs)
        if not self.running or self.computes_parts or in_backward():
            return call.runs(*args, **kwargs)
        looks = self.side_effects.looks
        output = self.side_effects.around(call.index, call.runs, args, kwargs) if looks else call.runs(*args, **kwargs)
        return note(self.stand_ins.noted.parts, self.stand_ins.number(call.index), output)

    def _capture(self, call: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        crossed = self._crossed
        leaves = crossed.fill(flatten(args, kwargs))
        main = (0,) if args and type(args[0]) is Tensor else call.main_leaves(args, kwargs)
        where = self.stop, self.where, self._trunk
        side = crossed.side_of(leaves, main, *where, self._tracer) if self.stop else other_tensors(leaves, main)
        tensors = [crossed.original(leaves[index]) for index in (*main, *side)]
        for tensor in tensors:
            if tensor.__class__ is not Tensor:
                refuse_away(tensor, f"an argument of layer {self.stop} of `{self._trunk}`")
        places = [*main, *side]
        luggage = self.side_effects.pack()
        if luggage is not None:
            tensors += luggage.tensors
            places += [-1] * len(luggage.tensors)
        self.sent = boundary_of(tensors, places, None if luggage is None else luggage.effects, self.tokens)
        self.sent.forms = self.stand_ins.all_forms()
        raise order.StageDone

    def _substitute(
        self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a layer of this stage, with what the stage before sent in the place of the stand-ins.

        The first layer of the stage receives: by identity, a stand-in turns into the received tensor wherever that is
        possible (`become`), so that user code which kept a reference (``x = layer(x) + x``) sees it too. Where it is
        not, the pair is noted as an alias, and later layers that are handed the stand-in get the tensor.
        """
        crossed = self._crossed
        if self._starts or (index > self.first and not crossed.aliases and not crossed.filled):
            return args, kwargs
        alone = len(self.received.leaves) == 1 and self.received.leaves[0].index == 0
        alone = alone and self.received.span is None and self.tokens is None
        alone = alone and index == self.first and self._tracer is None and bool(args)
        if alone and become(args[0], self.received.tensors[0], self.training):  # the usual case, without its nests
            self.received.tensors[0] = args[0]
            return (self._arrived(0), *args[1:]), kwargs
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if index == self.first:
            self._insert_received(leaves)
        else:
            given = crossed.fill([crossed.original(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
            leaves = self.received.note_given(index, leaves, given)
        new_args, new_kwargs = pytree.tree_unflatten(leaves, spec)
        return same_nests(args, new_args), same_nests(kwargs, new_kwargs)

    def _insert_received(self, leaves: list[Any]) -> None:
        """Put what the stage before sent in the place of the stand-ins, which become it wherever they can."""
        used: set[int] = set()
        for place, leaf in enumerate(self.received.leaves):
            if leaf.index < 0:
                continue
            stand_in, new = leaves[leaf.index], id(leaves[leaf.index]) not in used
            self.received.cut(place, stand_in)
            fills = new and (self.received.span is None or type(stand_in) is Away)  # or it may be the user's own
            if leaf.tokens is not None:
                tensor = self.received_at(place)
                became = fills and become_split(stand_in, tensor)
                tensor = stand_in if became else tensor
            else:
                became = fills and become(stand_in, self.received.tensors[place], self.training)
                if became:
                    self.received.tensors[place] = stand_in
                tensor = self._arrived(place)
            if stand_in is None:  # this micro-batch alone would need no mask
                self._crossed.filled[leaf.index] = self._crossed.made[id(tensor)] = tensor
            elif new and not became:
                self._crossed.aliases[id(stand_in)] = (stand_in, tensor)
            used.add(id(stand_in))
            leaves[leaf.index] = tensor
            if self._tracer is not None:
                self._tracer.note_made(tensor)

    def _arrived(self, place: int) -> Tensor:
        """A received tensor, into which layers may write if any did so in the first run."""
        writes = self._tracer is not None or self.writes((self.first, self.stop))
        return self.received.arrive(place) if writes else self.received.tensors[place]

    def received_at(self, place: int) -> Any:
        """The tensor that arrived at ``place`` of the boundary, of global shape where its tokens are split."""
        described = self.received.leaves[place].tokens
        if described is None or self.tokens is None:
            return self.received.tensors[place]
        return self.tokens.joined(self._arrived(place), described)

    def _recompute(self, index: int, call: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = self.received.given.get(index, {})
        if index == self.first:
            arrived = enumerate(self.received.leaves)
            given = {leaf.index: self.received_at(place) for place, leaf in arrived if leaf.index >= 0}
        if given:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            for at, tensor in given.items():
                leaves[at] = tensor
            args, kwargs = pytree.tree_unflatten(leaves, spec)
        if self.tokens is not None:
            args, kwargs = self.tokens.enter(call.module, args, kwargs)
        self._streams.enter(self.micro_batch, 1 + index)
        return call.runs(*args, **kwargs)
