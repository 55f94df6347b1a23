"""One pipeline stage: this rank's part of the module, and the user's step run on it.

Owned layers are wrapped so that the cursor sees their calls; everything that other stages own is hollow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_megatron.mesh.autograd import in_backward
from lightning_megatron.mesh.batches import map_tensors
from lightning_megatron.mesh.random_streams import SegmentStreams
from lightning_megatron.pipeline.cut.averaged_copies import install_views
from lightning_megatron.pipeline.cut.partition import Partition, parts_outside
from lightning_megatron.pipeline.elsewhere.provenance import Provenance
from lightning_megatron.pipeline.elsewhere.standin import Hidden, HollowModule, Sentinel, hide_parameter, meta_like
from lightning_megatron.pipeline.stage.boundary import Boundary, StageRun
from lightning_megatron.pipeline.stage.calls import FirstCall, GuardedNames, InnerCall, LayerCall, PartCall
from lightning_megatron.pipeline.stage.cursor import StageCursor, StageDone

_NOTHING = nullcontext()
_MARK = "_lightning_megatron_stage"


class Stage:
    """This rank's part of the module: owned layers wrapped, everything else hollow.

    Args:
        module: the whole module; cut in place.
        partition: who owns what.
        stage: this rank's stage.
        device: where this rank computes.
        streams: random streams per segment.
    """

    def __init__(
        self, module: nn.Module, partition: Partition, stage: int, device: torch.device, streams: SegmentStreams
    ) -> None:
        self.module = module
        self._device = device
        self.partition = partition
        self.stage = stage
        trunk = partition.trunk
        self.cursor = StageCursor(len(trunk.layer_names), trunk.name, streams)
        module.get_submodule(trunk.name).__dict__[_MARK] = self
        self.hidden: list[Hidden] = []
        self._emptied: list[tuple[nn.Module, str, str]] = []  # module, attribute, part
        shared = self._kept_modules()
        self._wrap_layers(self._kept_parameters(), shared)
        self._hollow_units(self._kept_parameters(), shared)
        self._skip_repeated_units()
        self.cursor.isolate_parts(parts_outside(module, trunk))
        self._guard_parameters()
        self.copies = partition.copies
        install_views(module, self.copies, self._shows_whole)

    @staticmethod
    def of(module: nn.Module) -> Stage | None:
        """The stage that an earlier run cut ``module`` for; ``None`` if the module is whole."""
        found = (child.__dict__.get(_MARK) for child in module.modules())
        return next((stage for stage in found if stage is not None), None)

    def _is_running(self) -> bool:
        return self.cursor.running or in_backward()

    def _shows_whole(self, copy: str) -> bool:
        return self.cursor.running or not self.copies.covers(copy)

    def _guard_parameters(self) -> None:
        """Let nobody sum over "all" parameters inside a step where only some are here."""
        partial = {""}
        for name in (*self.partition.trunk.layer_names, *self.partition.units):
            while name:
                name = name.rpartition(".")[0]
                partial.add(name)
        for name in partial:
            module = self.module.get_submodule(name)
            guard = GuardedNames(self.cursor, name, module)
            module.named_parameters = guard  # type: ignore[method-assign, assignment]

    def _kept_parameters(self) -> frozenset[int]:
        holders = self.partition.holders
        named = self.module.named_parameters(remove_duplicate=False)
        return frozenset(id(p) for name, p in named if self.stage in holders[name] and len(holders[name]) > 1)

    def _kept_modules(self) -> frozenset[int]:
        """Modules that are reached without passing through a part of another stage."""
        layers, owned = self.partition.trunk.layer_names, self.partition.layers_of(self.stage)
        elsewhere = {name for index, name in enumerate(layers) if index not in owned}
        elsewhere |= {name for name, stages in self.partition.units.items() if self.stage not in stages}
        return frozenset(id(child) for child in _reached(self.module, "", elsewhere))

    def _wrap_layers(self, kept: frozenset[int], shared: frozenset[int]) -> None:
        owned = self.partition.layers_of(self.stage)
        for index, name in enumerate(self.partition.trunk.layer_names):
            layer = self.module.get_submodule(name)
            for path, called in called_modules(layer, name):
                (LayerCall if called is layer else InnerCall)(self.cursor, index, path, called).install()
            if index not in owned:
                self._note_hollow(HollowModule(layer, name, self._device, self._is_running, kept, shared))

    def _hollow_units(self, kept: frozenset[int], shared: frozenset[int]) -> None:
        for name, stages in self.partition.units.items():
            if self.stage in stages:
                continue
            owner, _, leaf = name.rpartition(".")
            parent = self.module.get_submodule(owner)
            if leaf in parent._parameters:
                self._hide_direct(parent, leaf, name, kept)
                continue
            unit = parent.get_submodule(leaf)
            hollow = HollowModule(unit, name, self._device, self._is_running, kept, shared)
            PartCall(self.cursor, unit, hollow.sentinel).install()
            self._note_hollow(hollow)

    def _skip_repeated_units(self) -> None:
        """With several virtual stages here, what runs before the layers runs in the first of them only."""
        partition = self.partition
        if partition.owners.count(self.stage) == 1 or partition.owners[0] != self.stage:
            return
        for name in sorted(partition.before):
            owner, _, leaf = name.rpartition(".")
            unit = self.module.get_submodule(owner)._modules.get(leaf)
            if unit is not None:
                FirstCall(self.cursor, unit, Sentinel(name)).install()

    def _hide_direct(self, parent: nn.Module, leaf: str, name: str, kept: frozenset[int]) -> None:
        parameter = parent._parameters[leaf]
        assert parameter is not None
        if id(parameter) in kept:
            return
        hide_parameter(parent, leaf, Sentinel(name), self._device, self._is_running)
        self.hidden.append((parent, leaf, meta_like(parameter)))
        self._emptied.append((parent, leaf, name))

    def _note_hollow(self, hollow: HollowModule) -> None:
        self.hidden += hollow.hidden
        self._emptied += [(module, name, hollow.sentinel.name) for module, name, _ in hollow.hidden]

    def _new_watch(self, received: Boundary) -> Provenance:
        """Something that follows the values of one run."""
        named = self.module.named_parameters(remove_duplicate=False)
        made = frozenset(id(parameter) for name, parameter in named if not self.partition.is_everywhere(name))
        away = {id(module.__dict__[name]): part for module, name, part in self._emptied}
        return Provenance(made, away, frozenset(self.partition.trunk.layer_names), received.tensors)

    def run(
        self,
        virtual_stage: int,
        micro_batch: int,
        step: Callable[[Any, int], Any],
        batch: Any,
        received: Boundary,
        where: str,
    ) -> StageRun:
        """Run the user's step on one micro-batch.

        Args:
            virtual_stage: which of this rank's virtual stages.
            micro_batch: its number in the step.
            step: the user's step, taking the micro-batch and its number.
            batch: the micro-batch.
            received: what the previous virtual stage sent; empty on the first.
            where: name of the step; a backward follows ``"training_step"``.
        """
        bounds = self.partition.bounds[virtual_stage]
        watch = None if self.cursor.watch_plan.is_done(bounds, where) else self._new_watch(received)
        self.cursor.begin(bounds, micro_batch, received, where, watch)
        try:
            with watch or _NOTHING, self._keeping_early_buffers(virtual_stage):
                if watch is not None and self.cursor.sends and not self.cursor.training:
                    return self._discover(micro_batch, step, batch, received)
                return self._finish(micro_batch, step(batch, micro_batch), received)
        except StageDone:
            return StageRun(micro_batch, received, self.cursor.sent)
        finally:
            self.cursor.end()

    def resume(self, virtual_stage: int, run: StageRun) -> None:
        """Let layer calls during the backward of ``run`` (recomputation) see what its forward saw."""
        self.cursor.resume(self.partition.bounds[virtual_stage], run)

    def end(self) -> None:
        """Finish a backward: nothing of the micro-batch stays referenced here."""
        self.cursor.end()

    def owned_layers(self) -> list[nn.Module]:
        """The layers of the trunk that this rank computes, in their order."""
        names = self.partition.trunk.layer_names
        return [self.module.get_submodule(names[index]) for index in sorted(self.partition.layers_of(self.stage))]

    def may_write(self, virtual_stage: int, where: str) -> bool:
        """Whether layers of a virtual stage write into what it receives, or are not known not to."""
        bounds = self.partition.bounds[virtual_stage]
        return not self.cursor.watch_plan.is_done(bounds, where) or self.cursor.writes(bounds)

    def _keeping_early_buffers(self, virtual_stage: int) -> AbstractContextManager[None]:
        """Undo changes to them where a stage that has run the beginning of the step runs it once more, on stand-ins."""
        again = virtual_stage > 0 and self.partition.owners[0] == self.stage
        return self._undoing_buffers() if again and self.partition.early_buffers else _NOTHING

    @contextmanager
    def _undoing_buffers(self) -> Iterator[None]:
        buffers = [(name, self.module.get_buffer(name)) for name in self.partition.early_buffers]
        kept = [(name, buffer, buffer.clone()) for name, buffer in buffers]
        try:
            yield
        finally:
            for name, buffer, value in kept:
                owner, _, leaf = name.rpartition(".")
                with torch.no_grad():
                    self.module.get_submodule(owner)._buffers[leaf] = buffer.copy_(value)

    def _finish(self, micro_batch: int, output: Any, received: Boundary) -> StageRun:
        self.cursor.check_finished()
        self.cursor.check_output(output, self.module)
        return StageRun(micro_batch, received, Boundary(), output)

    def _discover(self, micro_batch: int, step: Callable[[Any, int], Any], batch: Any, received: Boundary) -> StageRun:
        """First evaluation run: with gradients on, to learn which layer arguments depend on parameters."""
        with torch.inference_mode(False), torch.enable_grad():
            copy = map_tensors(batch, torch.clone)
            for tensor in received.tensors:
                tensor.requires_grad_(tensor.is_floating_point())
            try:
                output = step(copy, micro_batch)
            except StageDone:
                sent = self.cursor.sent
                sent.tensors = [tensor.detach() for tensor in sent.tensors]
                return StageRun(micro_batch, received, sent)
            return self._finish(micro_batch, map_tensors(output, torch.detach), received)

    def counted_here(self, name: str) -> bool:
        """Whether this rank, among all stages that hold parameter ``name``, is the one that counts it in a norm."""
        return min(self.partition.holders[name]) == self.stage


def _reached(module: nn.Module, name: str, elsewhere: set[str]) -> Iterator[nn.Module]:
    if name in elsewhere:
        return
    yield module
    for key, child in module.named_children():
        yield from _reached(child, f"{name}.{key}" if name else key, elsewhere)


def called_modules(layer: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """The modules whose calls show that ``layer`` runs: itself, or what is inside a container without a forward."""
    if not isinstance(layer, (nn.ModuleList, nn.ModuleDict)):
        return [(name, layer)]
    return [called for key, child in layer.named_children() for called in called_modules(child, f"{name}.{key}")]
