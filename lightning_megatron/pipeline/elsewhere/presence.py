"""Knows what of a module is on this rank, and what user code sees of the rest.

Stages own different layers, tensor-parallel ranks different slices of one weight, and hooks, steps and summaries go
over all of it by name. Whoever has to answer for a name asks here instead of working it out again: which part it
belongs to, which stages hold it, which slice of it a rank has, and what it looks like in one process. What is seen of
it depends on when user code looks::

    phase   looks while                          here       a slice is here   on another stage
    STEP    the user's step runs                 itself     the slice         zeros that carry no gradient home
    HOOK    anything else runs                   itself *   all, if touched   absent: its shape, but no number
    WHOLE   code that names and counts runs      itself     its twin          its twin on the meta device

``*`` of a copy that hooks update (:mod:`~lightning_megatron.pipeline.cut.averaged_copies`) each stage lists just what
it has the source of.

A presence is made once, when a module is cut, and never changes; a run that learns more, such as which copies an
optimizer updates, replaces it. It costs no messages, since all ranks cut the same whole module.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_megatron.layers.table import ParameterSharding
from lightning_megatron.mesh.mesh import Holders
from lightning_megatron.mesh.parts.boxes import ShardSpec
from lightning_megatron.mesh.parts.names import leaf_of, outwards, owner_and_leaf, parent
from lightning_megatron.pipeline.cut.averaged_copies import Copies
from lightning_megatron.pipeline.cut.partition import Partition


class Phase(Enum):
    """When user code looks at a module; see the module's table."""

    STEP = "step"
    HOOK = "hook"
    WHOLE = "whole"


class Sight(Enum):
    """Ways in which user code may see a name."""

    REAL = "the tensor that this rank holds: all of it, or its slice"
    ZEROS = "zeros of its shape, to run a step over"
    ABSENT = "its shape, type and device, and an error instead of a number"
    TWIN = "a tensor on the meta device that looks as in one process"
    UNLISTED = "nothing: listings leave it out"


@dataclass(frozen=True)
class Part:
    """A unit of placement: a layer of the trunk, or a module or direct parameter outside it.

    Attributes:
        name: dotted name.
        stages: stages that compute with it.
        is_layer: whether it belongs to the trunk.
        chunk: the only virtual stage in which it runs; ``None`` if there are several, or they are not known.
    """

    name: str
    stages: frozenset[int]
    is_layer: bool = False
    chunk: int | None = None


@dataclass(frozen=True, eq=False)
class TensorPlace:
    """Place of one parameter or buffer of the whole module.

    Attributes:
        part: name of the :class:`Part` that it belongs to, under this name or else its first; ``""`` for none.
        stages: stages that hold it, under this or another name: more than the part's, where it is tied.
        sharding: the slice of it that this tensor-parallel rank has, on the stages that hold it.
        is_slice: whether that is less than all of it.
        twin: a tensor on the meta device that looks as the tensor does in one process: logical shape, unsplit and
            unpadded; a parameter for a parameter. Tied names share it, and what user code sets on it, as
            ``requires_grad``, stays.
        first: first name of the tensor: names of one tied parameter share it.
    """

    part: str
    stages: frozenset[int]
    sharding: ParameterSharding
    is_slice: bool
    twin: Tensor
    first: str


@dataclass(frozen=True)
class Presence:
    """Knows which of a module's parameters and buffers are on this rank: the one place that knows who owns what.

    Invariants: ``entries`` has every name of the whole module's ``state_dict`` on every rank, in the same order, with
    global shapes; each entry has at least one owner; tied parameters are one entry under several names.

    Attributes:
        stage: this rank's stage.
        stages: how many there are.
        tensor_rank: this rank's place in the tensor group.
        parts: by name, what was placed; empty where the module is not cut.
        entries: by name, every parameter and buffer of the whole module; tied ones under each of their names.
        copies: what hooks keep up to date from the weights.
        shared_buffers: names of the buffers outside the layers, or of those that layers share, which several stages
            may write into: those used only before the layers come last.
    """

    stage: int = 0
    stages: int = 1
    tensor_rank: int = 0
    parts: Mapping[str, Part] = field(default_factory=dict, repr=False)
    entries: Mapping[str, TensorPlace] = field(default_factory=dict, repr=False)
    copies: Copies = field(default_factory=Copies)
    shared_buffers: tuple[str, ...] = ()

    @classmethod
    def uncut(cls, module: nn.Module, table: Mapping[str, ParameterSharding], tensor_rank: int = 0) -> Presence:
        """Presence in a module that one stage holds.

        Args:
            module: with its layers split already, where there is tensor parallelism.
            table: how its parameters are split over tensor-parallel ranks.
            tensor_rank: this rank's place in the tensor group.
        """
        return cls(tensor_rank=tensor_rank, entries=_entries(module, table, {}, frozenset({0})))

    @classmethod
    def of_stage(
        cls,
        module: nn.Module,
        partition: Partition,
        stage: int,
        table: Mapping[str, ParameterSharding] | None = None,
        tensor_rank: int = 0,
    ) -> Presence:
        """Presence in a module that is about to be cut.

        Args:
            module: whole, but for what tensor-parallel ranks have split.
            partition: who owns what.
            stage: this rank's stage.
            table: how parameters are split over tensor-parallel ranks.
            tensor_rank: this rank's place in the tensor group.
        """
        everyone = frozenset(partition.owners)
        parts = {name: Part(name, stages) for name, stages in partition.units.items()}
        for names, chunk in ((partition.before, 0), (partition.after, len(partition.owners) - 1)):
            parts |= {name: replace(parts[name], chunk=chunk) for name in names}
        for chunk, ((start, stop), owner) in enumerate(zip(partition.bounds, partition.owners, strict=True)):
            names_here = partition.trunk.layer_names[start:stop]
            parts |= {name: Part(name, frozenset({owner}), is_layer=True, chunk=chunk) for name in names_here}
        entries = _entries(module, table or {}, parts, everyone)
        buffers = tuple(
            name
            for name in (*partition.late_buffers, *partition.early_buffers)
            if (part := _part_of(name, parts)) is None or part.is_layer or len(part.stages) > 1
        )
        return cls(stage, len(everyone), tensor_rank, parts, entries, partition.copies, buffers)

    def _entry(self, name: str) -> TensorPlace:
        entry = self.entries.get(name)
        if entry is None and self.stages > 1:
            raise RuntimeError(
                f"parameter `{name}` was registered after the module was cut into {self.stages} pipeline stages, so no "
                "stage owns it; register it in the constructor, or use `pipeline_parallel_size=1`."
            )
        return entry or _REGISTERED_LATER

    def is_here(self, name: str) -> bool:
        """Whether this stage holds the tensor ``name``, or a slice of it."""
        return name not in self.entries or self.stage in self.entries[name].stages

    def is_everywhere(self, name: str) -> bool:
        """Whether every stage computes with the part that parameter ``name`` belongs to."""
        part = self.part_of(name)
        return part is not None and len(part.stages) == self.stages

    def sight(self, name: str, phase: Phase) -> Sight:
        """How user code sees the tensor ``name``; see the module's table. What was registered later is real."""
        entry = self.entries.get(name)
        if entry is None:
            return Sight.REAL
        if self.stage not in entry.stages:
            return {Phase.STEP: Sight.ZEROS, Phase.HOOK: Sight.ABSENT, Phase.WHOLE: Sight.TWIN}[phase]
        if phase is Phase.WHOLE and entry.is_slice:
            return Sight.TWIN
        source = self.copies.source_of(name) if phase is Phase.HOOK else None
        return Sight.REAL if source is None or self.is_here(source) else Sight.UNLISTED

    def layer_names(self) -> list[str]:
        """Names of all layers of the trunk, in their order; empty where the module is not cut."""
        return [name for name, part in self.parts.items() if part.is_layer]

    def layers_here(self) -> list[str]:
        """Names of the trunk's layers that this stage computes, in their order; empty where the module is not cut."""
        return [name for name, part in self.parts.items() if part.is_layer and self.stage in part.stages]

    def layer_owners(self) -> list[int]:
        """The stage of every layer of the trunk, in their order; empty where the module is not cut."""
        return [min(part.stages) for part in self.parts.values() if part.is_layer]

    def begins_here(self) -> bool:
        """Whether this stage computes what a step computes before the layers."""
        return self.layer_owners()[:1] == [self.stage]

    def parts_of_some(self) -> list[str]:
        """Names of the parts outside the layers that this stage computes with, and some other stage does not."""
        own = (part for part in self.parts.values() if not part.is_layer and self.stage in part.stages)
        return [part.name for part in own if len(part.stages) < self.stages]

    def elsewhere(self) -> Iterator[tuple[str, TensorPlace]]:
        """Names of what this stage does not hold."""
        return ((name, entry) for name, entry in self.entries.items() if self.stage not in entry.stages)

    def note_missing(self, error: Exception) -> None:
        """Add to a ``KeyError`` about a parameter of another stage why user code has not found it."""
        if isinstance(error, KeyError) and error.args and error.args[0] in dict(self.elsewhere()):
            error.add_note(
                f"`{error.args[0]}` is on another pipeline stage than this code runs on. What a hook keeps of "
                "`named_parameters()` is what its own stage has, and `training_step` computes on the last one. Add the "
                "gradient of a penalty on weights to `.grad` in `on_before_optimizer_step`, over "
                "`self.named_parameters()`, which lists the same there as in other hooks; or use "
                "`pipeline_parallel_size=1`."
            )

    def shared_stage_sets(self, *, of_experts: bool = False) -> list[tuple[int, ...]]:
        """Sets of stages that hold a parameter, or one of distributed experts, together, each once, sorted: equal on
        all ranks.
        """
        parameters = [entry for entry in self.entries.values() if isinstance(entry.twin, nn.Parameter)]
        held = {entry.stages for entry in parameters if entry.sharding.of_experts or not of_experts}
        return sorted(tuple(sorted(stages)) for stages in held if len(stages) > 1)

    def part_of(self, name: str) -> Part | None:
        """The part that a tensor or module called ``name`` belongs to, or is."""
        return _part_of(name, self.parts)

    @functools.cached_property
    def order(self) -> Mapping[str, int]:
        """By name, the places of the entries in a listing of one process."""
        return {name: place for place, name in enumerate(self.entries)}

    def partial_modules(self) -> frozenset[str]:
        """Names of the modules that have parts below them, so that none of them may be whole here."""
        return frozenset(above for name in self.parts for above in outwards(parent(name)))

    def holders(self, name: str) -> Holders:
        """The stages and ranks that hold parameter ``name``, and whether their gradients of it are partial sums.

        Raises:
            RuntimeError: the parameter was registered after the module was cut.
        """
        entry = self._entry(name)
        return Holders(tuple(sorted(entry.stages)), entry.sharding.sums_gradient, entry.sharding.of_experts)

    def is_counted_here(self, name: str, *, over_stages: bool, over_tensor: bool) -> bool:
        """Whether this rank counts what it holds of parameter ``name`` in a sum over the ranks of a model: a slice
        always, a copy on the first of those who have it.

        Args:
            name: the parameter.
            over_stages: whether the copies of several stages are in the sum.
            over_tensor: whether those of tensor-parallel ranks are.
        """
        entry = self._entry(name)
        if over_tensor and not entry.is_slice and self.tensor_rank != 0:
            return False
        return not over_stages or min(entry.stages) == self.stage

    def are_whole_here(self, names: Iterable[str], *, slices: bool = False) -> bool:
        """Whether the gradients of these parameters are entirely on this rank, alike on all ranks that have them.

        Args:
            names: of the parameters.
            slices: count slices as whole, which is how hooks see them.
        """
        entries = [self._entry(name) for name in names]
        split = not slices and any(entry.is_slice or entry.sharding.sums_gradient for entry in entries)
        return not split and len({entry.part for entry in entries}) == 1


class Viewer(Protocol):
    """A presence's view of the running step of a module; implemented by its stage.

    Attributes:
        presence: what is here.
        lists_all: whether the hook that runs is given the parameters of all stages.
    """

    presence: Presence
    lists_all: bool

    def phase(self, *, lists: bool = False) -> Phase:
        """The code that runs now; for a listing of parameters, a step after its own backward counts as a hook."""

    def note_read(self) -> None:
        """Take note that user code has gone over all parameters of a module that has parts elsewhere."""


_REGISTERED_LATER = TensorPlace("", frozenset({0}), ParameterSharding(ShardSpec.whole(())), False, torch.empty(()), "")


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    """The module inside ``module`` that has the tensor ``name``, ``None`` if it was removed, and its attribute."""
    try:
        return owner_and_leaf(module, name)
    except AttributeError:
        return None, leaf_of(name)


def tensor_of(module: nn.Module, name: str) -> Tensor:
    """The tensor ``name`` of a module, or of another stage what stands for it here."""
    owner, leaf = owner_of(module, name)
    return getattr(owner, leaf)  # type: ignore[no-any-return]


def _part_of(name: str, parts: Mapping[str, Part]) -> Part | None:
    return next((parts[each] for each in outwards(name) if each in parts), None)


_Key = tuple[int, str]
"""What is one tensor under several names: a tied parameter, or one buffer of a module that has several names."""


def _entries(
    module: nn.Module, table: Mapping[str, ParameterSharding], parts: Mapping[str, Part], everyone: frozenset[int]
) -> dict[str, TensorPlace]:
    """An entry for every name of every parameter and buffer."""
    named = list(_named_tensors(module))
    stages: dict[_Key, frozenset[int]] = {}
    for name, tensor, key in named:
        part = _part_of(name, parts)
        if part is not None or not isinstance(tensor, nn.Parameter):  # else: a further name of a module that is a part
            stages[key] = stages.get(key, frozenset()) | (everyone if part is None else part.stages)
    entries: dict[str, TensorPlace] = {}
    firsts: dict[_Key, str] = {}
    for name, tensor, key in named:
        first = firsts.setdefault(key, name)
        sharding = table.get(name) or ParameterSharding(ShardSpec.whole(tensor.shape))
        part = _part_of(name, parts) or _part_of(first, parts)
        entries[name] = TensorPlace(
            part="" if part is None else part.name,
            stages=stages.get(key, everyone),
            sharding=sharding,
            is_slice=not sharding.replicated,
            twin=_twin(tensor, sharding.spec) if first == name else entries[first].twin,
            first=first,
        )
    return entries


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, _Key]]:
    """Every name of every parameter and buffer that has a shape.

    Buffers go by module, even where another one has the same tensor: they are assigned anew, ``self.table = ...``,
    module by module.
    """
    modules = {name: id(child) for name, child in module.named_modules(remove_duplicate=False)}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not is_lazy(parameter):
            yield name, parameter, (id(parameter), "")
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if not is_lazy(buffer):
            yield name, buffer, (modules[parent(name)], leaf_of(name))


def _twin(tensor: Tensor, spec: ShardSpec) -> Tensor:
    shape = spec.global_shape if tuple(tensor.shape) == spec.local_shape else tensor.shape
    empty = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
