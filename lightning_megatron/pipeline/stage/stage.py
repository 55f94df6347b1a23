"""One pipeline stage: this rank's part of the module, and the user's step run on it.

Owned layers are wrapped so that the cursor sees their calls; everything that other stages own is hollow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.layers.all_here import begin_pass, no_backward
from lightning_megatron.mesh.batches import map_tensors
from lightning_megatron.mesh.draws.random_streams import SegmentStreams
from lightning_megatron.mesh.marks import Marks
from lightning_megatron.mesh.messages.joint_backwards import JointBackwards
from lightning_megatron.mesh.parts.names import module_called, owner_and_leaf
from lightning_megatron.pipeline.cut.partition import Partition, parts_outside
from lightning_megatron.pipeline.elsewhere.away import LARGEST, STATE, Away, make_real
from lightning_megatron.pipeline.elsewhere.listing import install_listings
from lightning_megatron.pipeline.elsewhere.presence import Phase, Presence
from lightning_megatron.pipeline.elsewhere.provenance import Provenance
from lightning_megatron.pipeline.elsewhere.standin import Sentinel, hollow_out
from lightning_megatron.pipeline.elsewhere.undo import Contents
from lightning_megatron.pipeline.schedules.instructions import Schedule
from lightning_megatron.pipeline.stage.boundary import Boundary, StageRun
from lightning_megatron.pipeline.stage.calls import FirstCall, InnerCall, LayerCall, PartCall
from lightning_megatron.pipeline.stage.cursor import StageCursor
from lightning_megatron.pipeline.stage.order import LEFT_OUT, CalledAgain, StageDone
from lightning_megatron.pipeline.stage.side_effects import SideEffects
from lightning_megatron.pipeline.stage.trunk_output import JoinedBoundary

_NOTHING = nullcontext()


class Stage:
    """This rank's part of a module that was cut at its layers.

    The user's step runs in full on every stage. Layers of this stage compute; layers of others return stand-ins of the
    right shape, and their parameters are replaced by placeholders of no memory. Invariants: the module keeps its class,
    its submodules and all parameter names; a parameter has storage on exactly the stages that `presence` names; the cut
    outlives the run (a later ``fit`` or ``test`` of the same module goes on with it).

    Args:
        module: the whole module; cut in place.
        partition: who owns what.
        presence: what of the module is on this rank.
        device: where this rank computes.
        streams: random streams per segment.

    Attributes:
        presence: what of the module is on this rank; told anew which copies no optimizer updates in each run.
        cursor: follows the user's step through the layers.
        calls: of its layers, and of parts that other stages have.
        repeats: whether code runs whose calls of the model go through all stages.
        called_again: whether the latest step of evaluation called the layers a second time.
        device: where this rank computes.
        schedule: of the step that runs, or of the latest one.
        leaves_out: whether that step may return ``None`` before the layers, by which its batch is left out.
    """

    schedule: Schedule | None = None
    leaves_out = False

    def __init__(
        self,
        module: nn.Module,
        partition: Partition,
        presence: Presence,
        device: torch.device,
        streams: SegmentStreams,
    ) -> None:
        self.module = module
        self.partition = partition
        self.presence = presence
        self.stage, self.device = presence.stage, device
        self._marks, self._begins = Marks.of(module), presence.begins_here()
        trunk = partition.trunk
        self._numbers = {name: number for number, name in enumerate((*trunk.layer_names, *sorted(partition.before)))}
        effects = SideEffects(module, list(self._numbers), len(trunk.layer_names), device)
        self.calls: list[LayerCall | PartCall] = []
        self.lists_all = False
        self.repeats = self.called_again = False
        self._shared: list[tuple[str, nn.Module, str]] | None = None
        self.cursor = StageCursor(len(trunk.layer_names), trunk.name, streams, effects)
        self.cursor.earlier = self._earlier_weights()
        Marks.of(module.get_submodule(trunk.name)).put(self)
        self._wrap_layers()
        self._wrap_parts(hollow_out(module, presence, device, self.phase))
        self._follow_first_units()
        self.cursor.isolate_parts(parts_outside(module, trunk))
        install_listings(module, self)

    @staticmethod
    def of(module: nn.Module) -> Stage | None:
        """The stage that an earlier run cut ``module`` for; ``None`` if the module is whole."""
        found = (Marks.of(child).get(Stage) for child in module.modules())
        return next((stage for stage in found if stage is not None), None)

    def phase(self, *, lists: bool = False) -> Phase:
        """The user code that runs now: its step, or anything else; after its own backward, it may list parameters
        as in a hook.
        """
        between = lists and self.cursor.passes is not None and self.cursor.passes.is_between
        return Phase.STEP if self.repeats or (self.cursor.running and not between) else Phase.HOOK

    def renew(self, *, follows: bool) -> None:
        """Take note that layers have other hooks than before.

        Args:
            follows: whether the next run of each kind of step is followed as the first one was, for what these may do.
        """
        self.cursor.side_effects.look_again()
        if follows:
            self.cursor.trace_plan.renew()

    def note_read(self) -> None:
        """Take note that user code has gone over all parameters that this stage holds of a module."""
        self.cursor.parameters_read = True
        if self.cursor.passes is not None:
            self.cursor.passes.note_read()

    def note_trained(self, trained: Set[int]) -> None:
        """Say which parameters, by id, are trained: they are no copies, whatever they are called."""
        copies = self.presence.copies.without_trained(self.module, trained)
        self.presence = replace(self.presence, copies=copies)

    def _wrap_layers(self) -> None:
        for index, name in enumerate(self.partition.trunk.layer_names):
            layer = self.module.get_submodule(name)
            for path, called in called_modules(layer, name):
                self._follow((LayerCall if called is layer else InnerCall)(self.cursor, index, path, called))

    def _follow(self, call: LayerCall | PartCall) -> None:
        call.install()
        self.calls.append(call)

    def _wrap_parts(self, sentinels: Mapping[str, Sentinel]) -> None:
        """Let the parts of other stages, but for the layers, answer with zeros."""
        for name in self.partition.units:
            unit = module_called(self.module, name) if name in sentinels else None
            if unit is not None:
                self._follow(PartCall(self.cursor, self._numbers.get(name, -1), unit, sentinels[name]))

    def _follow_first_units(self) -> None:
        """Let what runs before the layers, in the first piece only, tell later stages its side effects."""
        if not self._begins:
            return
        for name in sorted(self.partition.before):
            unit = module_called(self.module, name)
            if unit is not None:
                self._follow(FirstCall(self.cursor, self._numbers[name], unit, Sentinel(name)))

    def _new_tracer(self, received: Boundary) -> Provenance:
        """Something that follows the values of one run."""
        return Provenance(self.module, self.presence, received.tensors, lambda: self.is_behind_layers)

    def run(
        self,
        virtual_stage: int,
        micro_batch: int,
        step: Callable[[Any, int], Any],
        batch: Any,
        received: Boundary,
        where: str,
        *,
        trunk_only: bool = False,
    ) -> StageRun:
        """Run the user's step on one micro-batch.

        Args:
            virtual_stage: which of this rank's virtual stages.
            micro_batch: its number in the step.
            step: the user's step, taking the micro-batch and its number.
            batch: the micro-batch.
            received: what the previous virtual stage sent; empty on the first.
            where: name of the step; a backward follows ``"training_step"``.
            trunk_only: end after the last layer, whose output is then what is sent.
        """
        return self._run(self.partition.bounds[virtual_stage], micro_batch, step, batch, received, where, trunk_only)

    def run_before(self, step: Callable[[Any, int], Any], batch: Any, where: str) -> StageRun:
        """Run the user's step on a whole batch up to the first layer; what that is called with is what is sent."""
        return self._run((0, 0), 0, step, batch, Boundary(), where)

    def run_behind(self, step: Callable[[Any, int], Any], batch: Any, received: JoinedBoundary, where: str) -> StageRun:
        """Run the user's step on a whole batch, for the code after the layers.

        Args:
            step: the user's step, taking the batch and 0.
            batch: the whole batch.
            received: what the last layer gave for its micro-batches.
            where: name of the step.
        """
        layers = len(self.partition.trunk.layer_names)
        return self._run((layers, layers), 0, step, batch, received, where)

    @property
    def calls_layers_whole(self) -> bool:
        """Whether each layer is called as a whole, so that the code before and after the layers can run separately."""
        layers = [self.module.get_submodule(name) for name in self.partition.trunk.layer_names]
        return not any(isinstance(layer, (nn.ModuleList, nn.ModuleDict)) for layer in layers)

    @property
    def is_behind_layers(self) -> bool:
        """Whether the user's step is running, and in or past the last layer."""
        return not self.cursor.sends and self.cursor.is_inside(len(self.partition.trunk.layer_names) - 1)

    def leaves_behind(self, where: str) -> bool:
        """Whether layers of this stage were seen to have side effects in the step of this name."""
        return self.cursor.side_effects.found_in(where)

    def _run(self, *args: Any) -> StageRun:
        joint = self._marks.get(JointBackwards)
        if joint is None:
            return self._run_alone(*args)
        with joint.noting() as noted:
            run = self._run_alone(*args)
        run.joint = joint, noted
        return run

    def _run_alone(
        self,
        bounds: tuple[int, int],
        micro_batch: int,
        step: Callable[[Any, int], Any],
        batch: Any,
        received: Boundary,
        where: str,
        trunk_only: bool = False,
    ) -> StageRun:
        tracer = None if self.cursor.trace_plan.is_done(bounds, where) else self._new_tracer(received)
        again = bounds[0] > 0 or received.span is not None
        STATE.weights = self._weight_at
        begin_pass(uneven=bool(received.leaves) and received.leaves[0].all_here)
        called = LEFT_OUT if self.leaves_out and bounds[0] > 0 and not received.leaves else 0
        self.cursor.begin(bounds, micro_batch, received, where, tracer, trunk_only=trunk_only, called=called)
        try:
            with tracer or _NOTHING, self._keeping_buffers(again):
                if tracer is not None and self.cursor.sends and not self.cursor.training:
                    return self._discover(micro_batch, step, batch, received)
                return self._finish(micro_batch, step(batch, micro_batch), received)
        except CalledAgain:
            self.called_again = True
            return StageRun(micro_batch, received, Boundary())
        except StageDone:
            sent = self.cursor.sent
            if not self.cursor.training:  # a trial runs with gradients on, which nobody asks for
                sent.tensors = [tensor.detach() for tensor in sent.tensors]
            return StageRun(micro_batch, received, sent)
        finally:
            self.cursor.end()

    def _earlier_weights(self) -> list[tuple[str, Tensor]]:
        """Weights that an earlier stage has too, which leaves the step before this one does; with their parts."""
        found: list[tuple[str, Tensor]] = []
        for name, parameter in self.module.named_parameters():
            entry = self.presence.entries.get(name)
            part = None if entry is None else self.presence.part_of(entry.part)
            if part is not None and self.stage in part.stages and min(part.stages) < self.stage:
                found.append((part.name, parameter))
        return found

    def _weight_at(self, tensor: Tensor) -> str:
        """Name of the parameter that shares memory with a tensor; or ""."""
        with torch._C.DisableTorchFunctionSubclass():
            memory = tensor.untyped_storage().data_ptr()
            listed = type(self.module).named_parameters(self.module)
            return next((n for n, p in listed if type(p) is nn.Parameter and _is_at(p, memory)), "") if memory else ""

    def resume(self, virtual_stage: int, run: StageRun) -> None:
        """Let layer calls during the backward of ``run`` (recomputation) see what its forward saw."""
        self.cursor.resume(self.partition.bounds[virtual_stage], run)

    def end(self) -> None:
        """Finish a backward: nothing of the micro-batch stays referenced here."""
        self.cursor.end()

    def owned_layers(self) -> list[nn.Module]:
        """The layers of the trunk that this rank computes, in their order."""
        return [self.module.get_submodule(name) for name in self.presence.layers_here()]

    def may_write(self, virtual_stage: int, where: str) -> bool:
        """Whether layers of a virtual stage may write into its input; true unless they are known not to."""
        bounds = self.partition.bounds[virtual_stage]
        return not self.cursor.trace_plan.is_done(bounds, where) or self.cursor.writes(bounds)

    def _keeping_buffers(self, again: bool) -> AbstractContextManager[None]:
        """Undo what a run writes of stand-ins into buffers that other stages have as well; and, where a stage that has
        run the beginning of the step runs it once more, what it writes into those of the beginning.
        """
        early, late = self.partition.early_buffers, self.partition.late_buffers
        if self._shared is None:
            names = [name for name in (*early, *late) if self.presence.is_here(name)]
            self._shared = [(name, *owner_and_leaf(self.module, name)) for name in names]
        if not self._shared:
            return _NOTHING
        return self._undoing_buffers(frozenset(early) if again and self._begins else frozenset())

    @contextmanager
    def _undoing_buffers(self, again: frozenset[str]) -> Iterator[None]:
        kept: list[tuple[str, nn.Module, str, Contents]] = []
        for name, child, leaf in self._shared or ():
            buffer: Tensor = child._buffers[leaf]  # type: ignore[assignment]
            small = not buffer.is_inference() and (buffer.numel() <= LARGEST or name in again)
            kept.append((name, child, leaf, Contents.of_tensor(buffer, copies=small)))
        try:
            yield
        finally:
            for name, child, leaf, before in kept:
                away = type(child._buffers[leaf]) is Away
                if away or name in again:
                    child._buffers[leaf] = make_real(before.value)
                    before.put_back()
                if name in STATE.undone and (away or name in again or id(before.value) in STATE.spared):
                    self._write_undone(name, before)
            STATE.spared.clear()

    def _write_undone(self, name: str, before: Contents) -> None:
        """Write what the real run of this rank wrote, after a run on stand-ins.

        Raises:
            RuntimeError: this run wrote of real values as well.
        """
        if before.copy is None or not torch.equal(before.value, before.copy):
            raise RuntimeError(
                f"two runs of the step on pipeline stage {self.stage} have each written into the buffer `{name}`, of "
                "which one process has one: its module runs between layers, or before and after them. Give each "
                "place a module of its own (of a batch norm: or use `nn.LayerNorm`), or use `pipeline_parallel_size=1`."
            )
        Contents(before.value, STATE.undone.pop(name), before.value._version).put_back()

    def _finish(self, micro_batch: int, output: Any, received: Boundary) -> StageRun:
        if output is None and self.leaves_out and self.cursor.leaves_out():
            return StageRun(micro_batch, received, Boundary())
        self.cursor.check_finished(output)
        self.cursor.check_output(output, self.module)
        return StageRun(micro_batch, received, Boundary(), output)

    def _discover(self, micro_batch: int, step: Callable[[Any, int], Any], batch: Any, received: Boundary) -> StageRun:
        """First evaluation run: with gradients on, to learn which layer arguments depend on parameters."""
        with torch.inference_mode(False), torch.enable_grad(), no_backward():
            for tensor in received.tensors:
                tensor.requires_grad_(tensor.is_floating_point())
            try:
                output = step(batch, micro_batch)
            except StageDone:
                sent = self.cursor.sent
                sent.tensors = [tensor.detach() for tensor in sent.tensors]
                return StageRun(micro_batch, received, sent)
            return self._finish(micro_batch, map_tensors(output, torch.detach), received)


def _is_at(parameter: nn.Parameter, memory: int) -> bool:
    return not parameter.is_meta and parameter.untyped_storage().data_ptr() == memory


def called_modules(layer: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """The modules whose calls show that ``layer`` runs: itself, or what is inside a container without a forward."""
    if not isinstance(layer, (nn.ModuleList, nn.ModuleDict)):
        return [(name, layer)]
    return [called for key, child in layer.named_children() for called in called_modules(child, f"{name}.{key}")]
