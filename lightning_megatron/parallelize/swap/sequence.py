"""Sequence parallelism for modules that were not written for it (Korthikanti et al., arXiv 2205.05198).

Between regions (norms, dropout, residual additions) activations are split along the sequence:

    embedding -> [split] -> layer 0 ... layer n-1 -> [gather] -> final norm, head
                             |
                             norm, + : on s/t     attention, MLP: [all-gather] .. local heads .. [reduce-scatter]

The sequence is gathered where a region begins: at the call of the module that contains the projections if that module
was called with the tensor that they read (attention code reads shapes from it), otherwise at the projections. The
reduce-scatter of the row-parallel layer splits it again. Parameters that act on sequence shards get partial gradients,
and the table of parameters says so.

Where code between the layers reads what they give (a loss on each layer's output, a residual connection around them),
or may read it, as it was not seen, each layer splits its input and gathers its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.layers.all_here import all_tokens_here
from lightning_megatron.layers.streams import RankStream
from lightning_megatron.mesh.messages.collectives import gather_for_shards
from lightning_megatron.mesh.parts.names import Parts, leaf_of, lies_in, parent
from lightning_megatron.mesh.pickling import RankHook
from lightning_megatron.parallelize.pairs.pair import holder_of
from lightning_megatron.parallelize.plan.blueprint import Blueprint, Door, Region
from lightning_megatron.parallelize.plan.row import SEQUENCE_SPLIT, ModuleRow
from lightning_megatron.parallelize.plan.styles import Style
from lightning_megatron.parallelize.reading.inputs import LENGTH
from lightning_megatron.parallelize.reading.kinds import hugging_face_models
from lightning_megatron.parallelize.reading.study import Study
from lightning_megatron.parallelize.reading.trace import Call, Trace
from lightning_megatron.parallelize.swap.all_tokens import AllTokensInside
from lightning_megatron.parallelize.swap.hooks_on_tokens import TokenHooks
from lightning_megatron.parallelize.swap.token_edges import LayerEdge, check_hidden, gathered, replace
from lightning_megatron.parallelize.trial.between_tokens import AllTokens
from lightning_megatron.parallelize.trial.mixed_gradients import check_gradients, mixed
from lightning_megatron.parallelize.trial.outside import partial_outside
from lightning_megatron.parallelize.trial.tokens import Tokens, check_layers, read_between, root_of


@dataclass
class SequencePlan:
    """Plan of where activations are split along the sequence and where they are whole.

    Attributes:
        module: the module.
        layers: names of the layers of the trunk, in execution order.
        dim: dim of the sequence in their hidden state.
        doors: per region of the trunk, by row name: the module at whose call the sequence is gathered and its
            arguments to gather, or None if the projections gather it.
        tokens: by layer, what has tokens in its arguments and its output.
        mixing: modules inside of the layers that get all tokens, by name.
        root: name of the module whose code between the layers was tried; ``None`` if none was.
        between: why each layer gathers its output; ``""`` where only the last one does.
        outside: parameters outside of the layers that act on sequence shards only (conditions, gates between layers).
        splits_input: whether the first layer splits its input; not where what splits tokens over context ranks does.
    """

    module: nn.Module
    layers: list[str]
    dim: int
    doors: dict[str, Door | None] = field(default_factory=dict)
    tokens: dict[str, Tokens] = field(default_factory=dict)
    mixing: dict[str, AllTokens] = field(default_factory=dict)
    root: str | None = None
    between: str = ""
    outside: set[str] = field(default_factory=set)
    splits_input: bool = True

    def carried_over(self, study: Study, module: nn.Module) -> SequencePlan:
        """Translate a plan made for a stand-in to the user's ``module``."""
        if study.module is module:
            return self
        doors = {
            rename(row): None if door is None else (rename(door[0]), door[1])
            for row, door in self.doors.items()
            for rename in study.renames(row)
        }
        layers = [original for name in self.layers for original in study.originals(name)]
        for name in sorted(self.outside):  # a list beside the layers, of which the stand-in read a part
            if any(part.isdigit() for part in name.split(".")):
                raise ValueError(mixed(name))
        tokens = {original: found for name, found in self.tokens.items() for original in study.originals(name)}
        mixing = {original: found for name, found in self.mixing.items() for original in study.originals(name)}
        layers.sort(key=_number)
        beside = self.root, self.between, self.outside, self.splits_input
        return SequencePlan(module, layers, self.dim, doors, tokens, mixing, *beside)

    def splits(self, region: Region) -> bool:
        """Whether the region is in the trunk, where the sequence is split."""
        return region.row in self.doors

    def dims(self, region: Region) -> tuple[int | None, int]:
        """Gather dim of a region's projections (None if a module around them gathers), and scatter dim of its row."""
        return (None if self.doors[region.row] is not None else self.dim), self.dim

    def enters_above(self, region: Region) -> bool:
        """Whether the sequence is gathered at the call of a module around the projections."""
        return self.doors[region.row] is not None

    def covers(self, name: str) -> bool:
        """Whether a parameter acts on sequence shards: those of the layers but for `mixing`, and `outside`."""
        if name in self.outside:
            return True
        return parent(name) in Parts(self.layers) and parent(name) not in Parts(self.mixing)

    def install(self, group: dist.ProcessGroup) -> None:
        """Add hooks to the trunk that split and gather the sequence and switch the dropout streams."""
        root = None if self.root is None else self.module.get_submodule(self.root)
        hooks = TokenHooks(self.dim, group, self.covers, self.module)
        for name in self.layers:
            layer = self.module.get_submodule(name)
            inside = {n: found for n, found in self.mixing.items() if lies_in(n, name)}
            hooks.put(layer, [self.module.get_submodule(n) for n in inside])
            edge = LayerEdge(
                *(RankStream(name, group.rank(), group.size()), group, self.dim, self.tokens[name]),
                hooks=hooks,
                root=None if self.gathers_each else root,
                outside=sorted(self.outside),
                splits=self.splits_input,
                ends=(name == self.layers[0], name == self.layers[-1]),
            )
            edge.install(layer)
            for n, found in inside.items():
                whole = AllTokensInside(edge.stream, group, self.dim, found)
                whole.install(self.module.get_submodule(n))
        for name, keys in {door for door in self.doors.values() if door is not None}:
            hook = _entering(keys, self.dim, group)
            self.module.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True, prepend=True)

    @property
    def gathers_each(self) -> bool:
        """Whether each layer splits its input and gathers its output; what splits tokens over context ranks knows of
        all code that reads them.
        """
        return self.splits_input and (self.root is None or bool(self.between))

    def rows(self) -> list[ModuleRow]:
        """Rows of the report for the ends of the trunk, or of each layer."""
        inside = [
            ModuleRow(name, "all tokens", None, None, "all-gather", "all-gather", "mixes tokens, and is not split")
            for name in self.mixing
        ]
        return inside + self._edges()

    def _edges(self) -> list[ModuleRow]:
        if self.gathers_each:
            note = (
                "code between the layers reads whole outputs" if self.between else "as code between them was not seen"
            )
            return [
                ModuleRow(name, SEQUENCE_SPLIT, None, None, "all-gather", "all-gather", note) for name in self.layers
            ]
        return [
            ModuleRow(self.layers[0], SEQUENCE_SPLIT, None, None, "", "all-gather"),
            ModuleRow(self.layers[-1], "sequence gather", None, None, "all-gather", ""),
        ]


def _number(layer: str) -> int:
    return int(leaf_of(layer))


def plan_sequence(module: nn.Module, blueprint: Blueprint, splits_input: bool = True) -> SequencePlan:
    """Find the trunk, and where the sequence is gathered for each region of a blueprint.

    Args:
        module: the traced module.
        blueprint: the decisions about it.
        splits_input: see `SequencePlan`.

    Raises:
        ValueError: the module could not be traced, or its structure does not allow sequence shards.
    """
    trace = blueprint.trace
    if trace is None:
        raise ValueError(
            f"`sequence_parallel=True` needs a forward of {type(module).__name__} on a tiny input to find its layers "
            f"({blueprint.untraced}); set `example_input_array`, or turn it off."
        )
    _check_outputs(module)
    layers = _trunk(module, blueprint, trace)
    call = trace.calls[layers[0]]
    dim = _sequence_dim(_hidden(call), layers[0])
    plan = SequencePlan(module, layers, dim, splits_input=splits_input)
    _check_heads(blueprint, trace)
    _leave_whole(blueprint, layers)
    for region in blueprint.regions:
        if parent(region.row) in Parts(layers):
            plan.doors[region.row] = _door(trace, region, layers)
    plan.tokens, plan.mixing = check_layers(blueprint, trace, layers, plan.doors, dim)
    root = root_of(trace, layers)
    if root is not None and root not in layers and all(trace.counts[name] == 1 for name in layers):
        plan.root, plan.between = root, read_between(trace, root, layers, dim, plan.tokens)
    if plan.between and not splits_input:
        raise ValueError(
            f"`sequence_parallel=True` with context ranks: the code between the layers of {parent(layers[0])!r} does "
            f"not work on a part of the tokens ({plan.between}), as where a residual goes around them; move it "
            "into the layers, or turn sequence parallelism off."
        )
    check_gradients(module, trace, [r for r in blueprint.regions if plan.splits(r)], plan.covers, dim)
    plan.outside = partial_outside(
        blueprint, trace, layers, plan.doors, plan.covers, apart=plan.gathers_each, mixing=plan.mixing
    )
    return plan


def _check_outputs(module: nn.Module) -> None:
    """Refuse Hugging Face models that collect values per token from their layers."""
    for name, model in hugging_face_models(module).items():
        for option in ("output_router_logits", "output_hidden_states"):
            if getattr(model.config, option, False) is True:
                raise ValueError(
                    f"`sequence_parallel=True`: {name or type(model).__name__!r} has `config.{option}=True`, which "
                    "collects a value for every token from its layers, and a layer sees only a part of them. Set it to "
                    "False, or turn sequence parallelism off."
                )


def _leave_whole(blueprint: Blueprint, layers: list[str]) -> None:
    """Leave what belongs to no region whole in the layers: its parts would be of other tokens on every rank."""
    members = {name for region in blueprint.regions for name in region.members}
    for name, style in list(blueprint.styles.items()):
        if name in members or not (style.is_column or style.is_row) or name not in Parts(layers):
            continue
        if blueprint.source == "argument":
            raise ValueError(
                f"`sequence_parallel=True`: the plan splits {name!r} ({style.value}) by itself, and ranks have parts "
                "of the tokens there. Leave it out of the plan, pair it with a layer that alone reads its output, or "
                "turn sequence parallelism off."
            )
        del blueprint.styles[name]
        blueprint.heads.discard(name)


def _check_heads(blueprint: Blueprint, trace: Trace) -> None:
    """Refuse cross-attention: its keys are not split like the tokens of the layer."""
    for name, style in blueprint.styles.items():
        if style is not Style.HEADS or name not in trace.calls:
            continue
        call = trace.calls[name]
        given: dict[str, Any] = dict(zip(("query", "key"), call.args, strict=False)) | call.kwargs
        query, key = given["query"], given["key"]
        if query is not key and not (query.shape == key.shape and torch.equal(query, key)):  # a trace keeps copies
            raise ValueError(
                f"`sequence_parallel=True`: the query and the key of {name!r} are different tensors (cross-attention); "
                "turn sequence parallelism off."
            )


def _trunk(module: nn.Module, blueprint: Blueprint, trace: Trace) -> list[str]:
    """Layers of the list that contains the regions; there must be exactly one such list."""
    names = [region.row for region in blueprint.regions]
    names += [name for name, style in blueprint.styles.items() if style is Style.HEADS]
    trunks: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        places = [i for i, p in enumerate(parts) if p.isdigit()]
        if places:
            trunks[".".join(parts[: places[0]])] = None
    if len(trunks) != 1:
        found = ", ".join(map(repr, trunks)) or "none"
        raise ValueError(
            f"`sequence_parallel=True` needs one list of layers that holds the column/row pairs; found {found}. Turn "
            "it off for encoder-decoder models and for models without a trunk."
        )
    prefix = next(iter(trunks))
    children = [f"{prefix}.{n}" if prefix else n for n, _ in module.get_submodule(prefix).named_children()]
    called = [name for name in trace.calls if name in children]
    if called:
        return called
    kinds = {type(module.get_submodule(name)) for name in children}
    if kinds & {nn.ModuleList, nn.ModuleDict}:
        raise ValueError(
            f"`sequence_parallel=True` needs layers that are called; those of {prefix!r} are containers whose parts "
            "are called one by one. Give them a `forward`, or turn it off."
        )
    named = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise ValueError(
        f"`sequence_parallel=True` needs a run of the layers of {prefix!r} ({named}) on a tiny input, and only parts "
        "of them ran on the inputs that were guessed. Give the LightningModule a `forward` that calls them and set "
        "`example_input_array`, or turn it off."
    )


def _hidden(call: Call) -> Tensor:
    if call.args and isinstance(call.args[0], Tensor):
        return call.args[0]
    value = call.kwargs.get("hidden_states")
    if isinstance(value, Tensor):
        return value
    raise ValueError(f"`sequence_parallel=True`: {call.name!r} is not called with a hidden state first; turn it off.")


def _sequence_dim(hidden: Tensor, name: str) -> int:
    check_hidden(hidden, name)
    return next((d for d in range(2) if hidden.shape[d] == LENGTH), 1)


def _door(trace: Trace, region: Region, layers: list[str]) -> Door | None:
    inputs = {id(trace.input_of(name)) for name in region.columns}
    if len(inputs) > 1:
        raise ValueError(
            f"`sequence_parallel=True`: {', '.join(map(repr, region.columns))} read different tensors "
            "(cross-attention, or low-rank projections of their own); turn sequence parallelism off."
        )
    door = holder_of(trace, region)
    if door is None or door[0] in layers or _has_other_readers(trace, region, door[0]):
        return None
    return door


def _has_other_readers(trace: Trace, region: Region, holder: str) -> bool:
    """Whether a layer that is not split reads what the columns do, in the module that would gather it for them."""
    x, inside = trace.input_of(region.columns[0]), [name for name in trace.sources if lies_in(parent(name), holder)]
    others = [name for name in inside if name not in region.members and trace.calls[name].tensors]
    return any(trace.input_of(name) is x for name in others)


def _entering(keys: Sequence[int | str], dim: int, group: dist.ProcessGroup) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if all_tokens_here():
            return None
        return replace(args, kwargs, keys, lambda x: gathered(x, dim if x.dim() > 2 else 0, group, gather_for_shards))

    return RankHook(hook)
