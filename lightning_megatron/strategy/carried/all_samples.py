"""Writes the state that steps carry to the next step from the samples of all replicas.

A queue of keys, a codebook that follows its vectors, a running maximum: a step writes it from the samples that it sees,
and a later step reads it. One process sees those of all replicas. So before such a step runs, it runs once more on the
samples of all, forward only; what the step leaves behind is what this pass has written::

    replica 0    pass [0 1 2 3] ──▶ writes W      step [0 1], forward and backward      goes on from W
    replica 1    pass [0 1 2 3] ──▶ writes W      step [2 3], forward and backward      goes on from W

Both find what the batch before has left. Where all values surely come together (:mod:`.ways_on`), there is no pass: the
replicas tell each other after the step what they have added. Which these are is found out by trials
(:mod:`~lightning_megatron.strategy.loss.over_replicas`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn, no_grad

from lightning_megatron.mesh.batches import batch_size_of, map_tensors
from lightning_megatron.mesh.draws.given_again import State, set_state
from lightning_megatron.mesh.draws.global_rows import Rows
from lightning_megatron.mesh.messages import objects
from lightning_megatron.pipeline.elsewhere.away import source_of
from lightning_megatron.pipeline.elsewhere.containers import MISSING
from lightning_megatron.pipeline.elsewhere.reachable import names_in
from lightning_megatron.pipeline.elsewhere.undo import LISTS, refill
from lightning_megatron.pipeline.run.pipeline_step import PipelineStep
from lightning_megatron.pipeline.stage.final_state import TRIAL
from lightning_megatron.strategy.data.joined_batches import in_order, joined_batches
from lightning_megatron.strategy.evaluation.value_of_replicas import KeptValue
from lightning_megatron.strategy.generation.repeats import StartOver
from lightning_megatron.strategy.hooks.backward_code import takes_gradients
from lightning_megatron.strategy.lightning.samplers import deals_in_turns
from lightning_megatron.strategy.logs.step_logs import no_logs
from lightning_megatron.strategy.loss.over_replicas import OverReplicas
from lightning_megatron.strategy.loss.tables import Name, Table, found_again, sendable, spelled
from lightning_megatron.strategy.loss.traces import Traces, as_it_is
from lightning_megatron.strategy.loss.trials.pieces_tried import Tried
from lightning_megatron.strategy.step.step import Outcome
from lightning_megatron.strategy.step.step_context import Stages, StepContext

_ASKS = frozenset({"is_grad_enabled", "requires_grad", "grad_fn", "is_inference_mode_enabled"})


class _OnePiece(NamedTuple):
    """The batch of the pass, as one piece."""

    pieces: list[Any]
    joins: dict[int, tuple[int, ...]]


class _SeesWhatIsSetBack:
    """Around each run of a pass on a virtual stage: notes what the step has set back after the layers, before what the
    run has written is taken back itself.

    Args:
        stages: of this rank's pipeline.
        found: where to note it.
        graphs: whether the pass needs them.
    """

    def __init__(self, stages: Stages, found: dict[tuple[str, Any], Any], *, graphs: bool) -> None:
        self._stages, self._found, self._graphs = stages, found, graphs
        self._without = no_grad()

    def __enter__(self) -> None:
        if not self._graphs:
            self._without.__enter__()

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if not self._graphs:
            self._without.__exit__(kind, *rest)
        if kind is None:
            self._found.update(self._stages.set_back())


@dataclass
class _Slot:
    """A value that the step goes on from.

    Attributes:
        kept: where it is, and what it was.
        way: how it comes together over replicas; "" where a pass has written it.
        original: the object that it was.
        stand: what the step finds in the place of a tensor, whose graph may hold it.
        written: from all samples, where a pass has written it.
    """

    kept: KeptValue
    way: Any
    original: Any
    stand: Any
    written: Any = MISSING


class AllSamples:
    """Lets the steps of a run go on from what the samples of all replicas write.

    Args:
        context: what steps run on.
        replicas: know which values these are.
    """

    def __init__(self, context: StepContext, replicas: OverReplicas) -> None:
        self._context, self._module, self._replicas = context, context.module, replicas
        self._tables: dict[Name, tuple[Table, Any] | None] = {}
        self._slots: dict[Name, _Slot] = {}
        self._handed = frozenset[Name]()
        self._counts: dict[Any, float] = {}
        self._keys: dict[Name, Any] = {}
        self._set_back: dict[tuple[str, Any], Any] = {}

    def write(self, call: Callable[[Any], Any], batch: Any) -> None:
        """Before a step: the pass on the samples of all replicas, where values do not come together otherwise.
        Collective over the world.

        Args:
            call: the user's step, taking a batch.
            batch: of this replica.

        Raises:
            RuntimeError: the batches of the replicas cannot be joined, or the step does not run on them at once.
        """
        self._slots, names = {}, self._replicas.carried.ways
        self._replicas.carried.passed = frozenset()
        new, self._handed = names.keys() - self._handed, frozenset(names)
        if not names:
            return
        if new and self._replicas.hand_over is not None:
            self._replicas.hand_over(names)
        passes, written = not all(names.values()), dict[Name, Any]()
        traces = Traces(self._module, beside=True) if passes or not self._tables.keys() >= names.keys() else None
        if passes and traces is not None:
            written = self._written(call, self._joined(batch, names), traces, names)
            self._replicas.carried.passed = frozenset(written)
        every = dict.fromkeys([*names, *written])
        held = {name for name in every if name[1] is not None and (spelled(name), None) in every}
        every = {name: None for name in every if name in written or name not in held}  # a list that stays where it is
        if traces is not None:
            self._tables = {name: traces.start_of(name) for name in every}
        weigh = {way for way in names.values() if callable(way)}
        self._counts = {"sizes": float(batch_size_of(batch)), **{way: float(way(batch)) for way in weigh}}
        found = {name: self._slot(name, "" if passes else names[name], written) for name in every}
        self._slots = {name: slot for name, slot in found.items() if slot is not None}

    def settle(self) -> None:
        """After the step: let it have written what the samples of all replicas write. Collective over these.

        Raises:
            RuntimeError: the step has done something else with a value than in the steps that were tried.
        """
        slots, self._slots = self._slots, {}
        if not slots:
            return
        together = {name: slot for name, slot in slots.items() if slot.way}
        for slot in together.values():
            slot.kept.end_batch(self._module)
        mine = {n: slot.kept.tell(self._module, slot.way, [self._counts]) for n, slot in together.items()}
        told = [each or {} for each in objects.gather(mine, self._replicas.group)] if together else []
        for name, slot in together.items():
            each = [one[name] for one in told]
            if any(one.added is None for one in each):
                self._refuse([name], "in this step it writes it otherwise than in those that were tried")
            slot.written = slot.kept.together(slot.kept.now(self._module), each, slot.way)
        for slot in slots.values():
            self._set(slot)

    def _set(self, slot: _Slot) -> None:
        key, values = slot.kept.key, found_again(self._module, slot.kept.table)
        if values is None:
            return
        now, value = values.get(key, MISSING), slot.written
        if value is MISSING:
            values.pop(key, None)
        elif isinstance(value, State):
            set_state(slot.original, value)
        elif isinstance(value, LISTS) or isinstance(now, LISTS):
            holder = now if isinstance(now, LISTS) else type(value)()
            refill(holder, value)
            values[key] = holder
        elif now is slot.stand and _fits(value, slot.original):
            with no_grad():
                slot.original.copy_(value)
            values[key] = slot.original
        else:
            values[key] = value

    def _joined(self, batch: Any, names: Collection[Name]) -> Any:
        """The samples of all replicas, in the order of one process."""
        if self._replicas.kept.places:
            rows = ", ".join(f"`{spelled(name)}`" for name in self._replicas.kept.places)
            self._refuse(names, f"it keeps {rows} of each sample of the batch before")
        told = objects.gather(map_tensors(batch, lambda tensor: tensor.detach().cpu()), self._replicas.group)
        whole: Any = told[0]
        for other in told[1:]:
            whole = None if whole is None else joined_batches(whole, other)
        if not all(objects.gather(whole is not None, self._context.mesh.group("world"))):
            self._refuse(names, "their batches cannot be joined, as their samples are of unlike sizes")
        sizes = [batch_size_of(each) for each in told]
        if len(set(sizes)) == 1 and deals_in_turns(self._module):
            whole = in_order(whole, torch.arange(sum(sizes)).view(len(sizes), -1).t().flatten().tolist())
        return map_tensors(whole, lambda tensor: tensor.to(self._context.device))

    def _written(
        self, call: Callable[[Any], Any], whole: Any, traces: Traces, names: Collection[Name]
    ) -> dict[Name, Any]:
        """Values of some names that a step on all samples writes, on every stage of the pipeline."""
        context, stages = self._context, self._context.stages
        call = context.gradients.on_parts(call)
        call = context.experts.ending(call) if stages.repeats is None else call
        graphs = context.mesh.layout.pipeline > 1 or takes_gradients(self._module) or self._asks_for_graphs

        def tried() -> Tried:
            around = _SeesWhatIsSetBack(stages, self._set_back, graphs=graphs)
            return Tried(call, context.recording, traces, _OnePiece([whole], {}), stages, 1, around)

        self._set_back = {}
        found = tried()
        if self._runs(found, whole):  # it has called the layers again, for the first time
            self._runs(found := tried(), whole)
        changes = {name: now for name, (_, now) in found.changes(0).items() if not self._replicas.comes_together(name)}
        self._keys.update({sendable(name, self._module): name[1] for name in changes})
        mine = {sendable(name, self._module): now for name, now in changes.items()}
        ends = objects.gather((found.failed, found.draws.any), context.mesh.group("world"))
        if failed := next((failed for failed, _ in ends if failed), ""):
            self._refuse(names, f"the step does not run on the samples of all of them at once ({failed})")
        return self._alike(mine, any_draws=any(draws for _, draws in ends))

    @functools.cached_property
    def _asks_for_graphs(self) -> bool:
        """Whether code of the step may write other things where nothing has a gradient."""
        return any(_ASKS & set(names_in(function.__code__)[0]) for function in self._replicas.carried.called)

    def _runs(self, tried: Tried, whole: Any) -> bool:
        """Run the pass; whether it has to run anew."""
        context, stages, size = self._context, self._context.stages, batch_size_of(whole)
        passes = context.passes
        step = PipelineStep(context.schedule(1, forward_only=True), tried, [whole], TRIAL)
        drawing, running = context.streams.before_step([Rows(0, size, size)]), stages.running(whole, 1, training=False)
        with drawing, context.tries(), running as executor:
            executor.run(step) if passes is None else passes.try_on(step, context.streams)
        outcome = stages.outcome(lambda: Outcome(no_logs(context.device)), TRIAL)
        stages.settle()
        again = isinstance(outcome.output, StartOver)
        if stages.repeats is not None and again:
            stages.repeats.note("training_step")
        return again

    def _alike(self, mine: dict[Name, Any], *, any_draws: bool) -> dict[Name, Any]:
        """Values that the pass has written on any stage and set back after its layers; of replicas that draw unlike
        numbers, what the first one has.
        """
        mesh, back = self._context.mesh, self._set_back
        if any_draws:
            mine = dict(_told(mine, mesh.group("data_parallel"))[0])
        if mesh.layout.pipeline == 1:
            return mine
        others = reversed(_told(mine, mesh.group("pipeline_parallel")))
        mine = {name: value for each in others for name, value in each.items()} | mine
        left = {name: () if value is MISSING else (value,) for name, value in back.items()}
        for each in _told(left, mesh.group("pipeline_parallel")):
            mine |= {name: value[0] if value else MISSING for name, value in each.items() if name in mine}
        return mine

    def _slot(self, name: Name, way: Any, written: Mapping[Name, Any]) -> _Slot | None:
        """Location of a value on this rank; ``None`` where another stage has it."""
        place = self._tables[name]
        values = None if place is None else found_again(self._module, place[0])
        if place is None or values is None:
            return None
        key = self._key(name)
        original = values.get(key, MISSING)
        if source_of(original) is not None or (isinstance(original, Tensor) and not _is_here(original)):
            return None
        start = as_it_is(original)
        stand, value = original, written.get(name, start)
        if isinstance(original, Tensor):
            values[key] = stand = original.detach().clone()
            value = map_tensors(value, lambda tensor: tensor.to(original.device))
        return _Slot(KeptValue(place[0], key, start), way, original, stand, value)

    def _key(self, name: Name) -> Any:
        """The key of a value on this rank; a module is told by its path."""
        of_modules = any(isinstance(key, nn.Module) for (table, _), key in self._keys.items() if table == name[0])
        if name in self._keys or not of_modules:
            return self._keys.get(name, name[1])
        return dict(self._module.named_modules()).get(name[1], name[1])

    def _refuse(self, names: Collection[Name], why: str) -> None:
        listed = ", ".join(f"`{spelled(name)}`" for name in names)
        raise RuntimeError(
            f"`training_step` writes {listed} from the samples of a batch and goes on from it, and the replicas cannot "
            f"write what one process writes from the samples of all: {why}. Write what the replicas gather "
            "(`self.all_gather(x)`), use a torchmetrics object, or pass `whole_batch_loss=False` if each replica's own "
            "is meant."
        )


def _told(values: Mapping[Name, Any], group: dist.ProcessGroup) -> list[Mapping[Name, Any]]:
    """Values of all ranks of a group, whose tensors are on the CPU then."""
    sent = {name: map_tensors(value, Tensor.cpu) for name, value in values.items()}
    return [each or {} for each in objects.gather(sent or None, group)]


def _is_here(tensor: Tensor) -> bool:
    """Whether a tensor is more than zeros in the shape of another stage's."""
    return type(tensor) is Tensor and not tensor.is_meta and (tensor.numel() < 2 or any(tensor.stride()))


def _fits(value: Any, original: Any) -> bool:
    """Whether a value can be written into the tensor that was there."""
    return isinstance(value, Tensor) and isinstance(original, Tensor) and value.shape == original.shape
