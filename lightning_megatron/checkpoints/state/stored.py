"""State of a module and its optimizers on this rank, under the names and logical shapes that checkpoints use.

A parameter is stored under its name, a state of its optimizer under ``optimizer.<index>.<name>.<state>``; both are
logical tensors, of which this rank holds pieces. Tied parameters are stored under the first of their names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.checkpoints.state.slices import TensorState
from lightning_megatron.mesh.parts.boxes import ShardSpec
from lightning_megatron.mesh.parts.pieces import PiecedTensor

GroupNames = list[list[str]]
"""Names of the parameters of each group of an optimizer, over all stages, in the user's order."""
Kinds = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Logical shape and type of stored tensors, by name."""
_SHOWN = 8  # names of tensors in a message


@dataclass(frozen=True)
class StatePlace:
    """Location of an optimizer's state of (a piece of) one parameter.

    Attributes:
        name: the parameter's name.
        key: what ``optimizer.state`` is keyed by.
        spec: the part of the logical parameter that a state tensor shaped like ``key`` belongs to.
        member: the parameter in the optimizer's groups, where that is not ``key``.
    """

    name: str
    key: nn.Parameter
    spec: ShardSpec
    member: nn.Parameter | None = None


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Name of every parameter by identity; the first one of a tied parameter."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def aliases(module: nn.Module) -> dict[str, str]:
    """Further names of tied parameters and buffers -> the name they are stored under."""
    first: dict[int, str] = {}
    further: dict[str, str] = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if id(tensor) in first:
            further[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
    return further


def stored_module(module: nn.Module, tensor: TensorState, without: Collection[str] = ()) -> dict[str, Any]:
    """This rank's part of ``module.state_dict()``: tensors that are split over tensor ranks as pieces."""
    return {name: tensor.pieces(name, value) for name, value in module.state_dict().items() if name not in without}


def state_places(optimizer: Optimizer, module: nn.Module, tensor: TensorState) -> list[StatePlace]:
    """Locations of the state of an optimizer that updates whole (tensor-parallel) parameters."""
    names = parameter_names(module)
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [StatePlace(names[id(p)], p, tensor.spec_of(names[id(p)], p.shape)) for p in members if id(p) in names]


def stored_optimizer(
    optimizer: Optimizer, names: GroupNames, places: Sequence[StatePlace], added: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """State of this rank's parameters by name, and the groups with the names of all stages' parameters.

    Args:
        optimizer: holds this rank's parameters.
        names: by group.
        places: of its state.
        added: further groups, of all stages.
    """
    state = {}
    for place in places:
        entries = optimizer.state.get(place.key)
        if entries:
            state[place.name] = {key: _pieces(value, place) for key, value in entries.items()}
    groups = [{**group, "params": members} for group, members in zip(optimizer.param_groups, names, strict=False)]
    return {"state": state, "param_groups": [*groups, *added]}


def added_groups(optimizer: Optimizer, names: GroupNames, known: Mapping[int, str]) -> list[dict[str, Any]]:
    """Options, and names of this rank's parameters, of the groups that were added since the run began.

    Args:
        optimizer: holds this rank's parameters.
        names: by group, of the groups at the beginning.
        known: parameter names by identity.
    """
    return [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [known[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups[len(names) :]
    ]


def joined_groups(stages: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The added groups of all stages: a hook adds one group per stage, each naming what its stage knows of.

    Args:
        stages: of each, :func:`added_groups`.
    """
    joined: list[dict[str, Any]] = []
    for stage in stages:
        for number, group in enumerate(stage):
            if number == len(joined):
                joined.append({**group, "params": []})
            members = joined[number]["params"]
            members += [name for name in group["params"] if name not in set(members)]
    return joined


def add_saved_groups(
    optimizer: Optimizer, names: GroupNames, groups: Sequence[Mapping[str, Any]], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Add the groups that a callback had added in the run that was saved, such as those of unfrozen layers.

    Args:
        optimizer: as ``configure_optimizers`` made it.
        names: of the parameters in its groups; gets those of the new ones.
        groups: saved, with the names of the parameters of all stages.
        parameters: this rank's, by name.
    """
    held = {name for group in names for name in group}
    for group in groups[len(optimizer.param_groups) :]:
        if held & set(group["params"]):
            return
        members = [parameters[name] for name in group["params"] if name in parameters]
        optimizer.add_param_group({**group, "params": members})
        names.append(list(group["params"]))


def _pieces(value: Any, place: StatePlace) -> Any:
    if not isinstance(value, Tensor) or tuple(value.shape) != place.spec.local_shape:
        return value
    return PiecedTensor(place.spec, value.detach().contiguous())


def plain_values(states: Sequence[Mapping[str, Any]]) -> list[dict[Any, dict[str, Any]]]:
    """Values other than tensors in the state of optimizers (counts, lists), by optimizer, parameter and name."""
    kinds = (Tensor, PiecedTensor)
    values = [
        {
            name: {k: v for k, v in entries.items() if not isinstance(v, kinds)}
            for name, entries in each["state"].items()
        }
        for each in states
    ]
    return [{name: entries for name, entries in each.items() if entries} for each in values]


def joined_values(ranks: Sequence[Sequence[Mapping[Any, Any]]]) -> list[dict[Any, dict[str, Any]]]:
    """The plain values of all ranks; those of replicas are equal."""
    optimizers = max((len(rank) for rank in ranks), default=0)
    joined: list[dict[Any, dict[str, Any]]] = [{} for _ in range(optimizers)]
    for rank in ranks:
        for mine, values in zip(joined, rank, strict=False):
            for name, entries in values.items():
                mine.setdefault(name, entries)
    return joined


def load_optimizer(
    optimizer: Optimizer,
    names: GroupNames,
    places: Sequence[StatePlace],
    saved: Mapping[str, Any],
    *,
    keep_types: bool = False,
) -> None:
    """Load this rank's part of a state saved by name, or by index as plain torch does.

    Args:
        optimizer: holds this rank's parameters.
        names: of its parameters by group.
        places: of its state.
        saved: what was saved.
        keep_types: whether values stay of the type they were saved in; else they take the parameter's, as in torch.

    Raises:
        ValueError: the numbers of parameter groups differ.
    """
    groups = saved["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"the checkpoint's optimizer has {len(groups)} parameter groups, this run's has "
            f"{len(optimizer.param_groups)}; return the same groups from `configure_optimizers`, or load the weights "
            "only: `MegatronCheckpointIO(load_optimizer=False)`."
        )
    order = [name for group in names for name in group]
    by_name = {order[key] if isinstance(key, int) else key: value for key, value in saved["state"].items()}
    template = optimizer.state_dict()["param_groups"]
    merged = [{**group, "params": own["params"]} for group, own in zip(groups, template, strict=True)]
    needed = [name for name in optimizer.defaults if all(name in group for group in template)]  # torch adds defaults
    optimizer.load_state_dict({"state": {}, "param_groups": merged})
    _check_kind(optimizer, needed, groups[0])
    options = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for place in places:
        entries = by_name.get(place.name)
        if entries is not None:
            group = options.get(id(place.key if place.member is None else place.member), {})
            on_device = bool(group.get("capturable") or group.get("fused"))
            optimizer.state[place.key] = {
                key: _local(key, value, place, on_device, keep_types) for key, value in entries.items()
            }


def _check_kind(optimizer: Optimizer, needed: Sequence[str], saved: Mapping[str, Any]) -> None:
    """Refuse the state of an optimizer of another kind, which lacks options that this one reads in every step.

    Raises:
        ValueError: with the options that are missing.
    """
    missing = [name for group in optimizer.param_groups for name in needed if name not in group]
    if missing:
        kind = type(optimizer).__name__
        theirs = ", ".join(sorted(name for name in saved if name != "params"))
        raise ValueError(
            f"the checkpoint's optimizer is another one: it has no {', '.join(dict.fromkeys(missing))}, which {kind} "
            f"needs, but {theirs}. Return the same optimizer from `configure_optimizers`, or load the weights only: "
            "`MegatronCheckpointIO(load_optimizer=False)`."
        )


def _local(key: str, value: Any, place: StatePlace, step_on_device: bool, keep_types: bool) -> Any:
    """A loaded value as the optimizer keeps it: torch's own rules for device and type, on this rank's piece."""
    if not isinstance(value, (PiecedTensor, Tensor)):
        return value
    dtype = value.dtype if keep_types or not value.dtype.is_floating_point else place.key.dtype
    if isinstance(value, PiecedTensor):
        return value.local.to(place.key.device, dtype)
    if key == "step":
        return value.to(place.key.device, torch.float32) if step_on_device else value
    if tuple(value.shape) == place.spec.global_shape:
        value = place.spec.slice_full(value)
    return value.to(place.key.device, dtype)


def load_module(module: nn.Module, state: Mapping[str, Any], tensor: TensorState) -> None:
    """Load this rank's part of a whole or partial state: pieces, logical tensors, or anything else as it is."""
    local = module.state_dict()
    parts = {name: _part(tensor, name, value) for name, value in state.items() if name in local}
    module.load_state_dict(parts, strict=False)


def _part(tensor: TensorState, name: str, value: Any) -> Any:
    if isinstance(value, PiecedTensor):
        return value.local
    return tensor.to_local(name, value) if isinstance(value, Tensor) else value


def optimizer_names(kinds: Kinds) -> Iterator[tuple[str, int, str, str]]:
    """Stored name, optimizer index, parameter name and state name of every stored optimizer tensor."""
    for stored in kinds:
        parts = stored.split(".")
        if parts[0] == "optimizer" and len(parts) >= 4 and parts[1].isdigit():
            yield stored, int(parts[1]), ".".join(parts[2:-1]), parts[-1]


def values_here(
    values: Mapping[Any, dict[str, Any]], places: Sequence[StatePlace], further: Mapping[str, str], names: GroupNames
) -> dict[str, dict[str, Any]]:
    """Those of :func:`plain_values` that belong to parameters of this rank, by their names here."""
    order = [name for group in names for name in group]
    found = {}
    for name in dict.fromkeys(place.name for place in places):
        number = f"#{order.index(name)}" if name in order else ""
        entries = values.get(further.get(name, name)) or values.get(number)
        if entries:
            found[name] = dict(entries)
    return found


def optimizer_templates(
    kinds: Kinds, index: int, places: Sequence[StatePlace], further: Mapping[str, str], names: GroupNames
) -> dict[str, tuple[str, str, PiecedTensor]]:
    """Empty pieces for this rank's part of a stored optimizer: stored name -> parameter name, state name, pieces.

    A state imported from a Lightning file is stored by the number of its parameter: ``optimizer.0.#3.exp_avg``.
    """
    by_name = {further.get(place.name, place.name): place for place in places}
    order = [name for group in names for name in group]
    by_name |= {f"#{order.index(place.name)}": place for place in places if place.name in order}
    templates = {}
    for stored, number, parameter, key in optimizer_names(kinds):
        place = by_name.get(parameter)
        if number != index or place is None:
            continue
        shape, dtype = kinds[stored]
        split = tuple(shape) == place.spec.global_shape
        spec = place.spec if split else ShardSpec.whole(shape)
        device = place.key.device if shape else "cpu"
        templates[stored] = (
            place.name,
            key,
            PiecedTensor(spec, torch.zeros(spec.local_shape, dtype=dtype, device=device)),
        )
    return templates


@dataclass(frozen=True)
class Match:
    """Matches each of a module's tensors with the stored one that it is loaded from, and lists those that do not fit.

    Attributes:
        stored: name in the module -> name in the checkpoint, where both have the same shape.
        missing: in the module, not in the checkpoint.
        unexpected: in the checkpoint, not in the module.
        reshaped: name -> shape in the checkpoint and in the module.
    """

    stored: dict[str, str]
    missing: list[str]
    unexpected: list[str]
    reshaped: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]

    @property
    def fits(self) -> bool:
        """Whether nothing is left over on either side."""
        return not (self.missing or self.unexpected or self.reshaped)

    def __str__(self) -> str:
        reshaped = [f"{name} {a} in the checkpoint, {b} here" for name, (a, b) in self.reshaped.items()]
        parts = {"missing": self.missing, "unexpected": self.unexpected, "reshaped": reshaped}
        return ", ".join(f"{what} {_first_of(names)}" for what, names in parts.items())


def _first_of(names: list[str]) -> str:
    """A list that a reader takes in at a glance: its beginning, and how many more there are."""
    more = len(names) - _SHOWN
    return f"{names[:_SHOWN]} and {more} more" if more > 0 else str(names or "nothing")


def match(
    kinds: Kinds,
    shapes: Mapping[str, torch.Size],
    further: Mapping[str, str],
    saved_aliases: Mapping[str, str],
    prefixes: Mapping[str, str] | None = None,
) -> Match:
    """Find the stored tensor of every tensor of a module.

    Args:
        kinds: what is stored; optimizers' states are passed over.
        shapes: logical shape of the module's tensors by name, over all stages.
        further: the module's tied names, as :func:`aliases` gives them.
        saved_aliases: those of the module that was saved.
        prefixes: start of a stored name -> start of the name here; the longest that fits counts.
    """
    optimizers = {stored for stored, *_ in optimizer_names(kinds)}
    renamed = {_renamed(stored, prefixes or {}): stored for stored in kinds if stored not in optimizers}
    for alias, name in saved_aliases.items():
        if name in kinds:
            renamed.setdefault(_renamed(alias, prefixes or {}), name)
    tied = {first: renamed[name] for name, first in further.items() if name in renamed}  # stored under a later name
    found: dict[str, str] = {}
    missing, reshaped = [], {}
    for name, shape in shapes.items():
        first = further.get(name, name)
        stored = renamed.get(first, renamed.get(name, tied.get(first)))
        if stored is None:
            missing.append(name)
        elif tuple(kinds[stored][0]) != tuple(shape):
            reshaped[name] = (tuple(kinds[stored][0]), tuple(shape))
        else:
            found[name] = stored
    unexpected = sorted(name for name in renamed if name not in shapes)
    return Match(found, missing, unexpected, reshaped)


def _renamed(stored: str, prefixes: Mapping[str, str]) -> str:
    fitting = [prefix for prefix in prefixes if stored.startswith(prefix)]
    if not fitting:
        return stored
    longest = max(fitting, key=len)
    return prefixes[longest] + stored[len(longest) :]
