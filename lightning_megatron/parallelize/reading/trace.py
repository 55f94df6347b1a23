"""Traces a module in execution order: which linear layers feed which, and in which calls.

The module runs once on a tiny input, and every call is recorded. From the autograd graph of the outputs follows, for
each linear layer, from the outputs of which linear layers its input was computed, with only parameter-free code, norms
and the like in between. Pairs of column- and row-parallel layers are found in this way, not by names or the order of
registration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_megatron.mesh.autograd import graph_behind
from lightning_megatron.mesh.parts.names import lies_in
from lightning_megatron.parallelize.reading.divisible import divisible
from lightning_megatron.parallelize.reading.kinds import is_attention, is_table
from lightning_megatron.parallelize.reading.low_rank import is_splittable, low_rank
from lightning_megatron.parallelize.reading.replay import Replay
from lightning_megatron.parallelize.reading.weight_uses import WeightUses


@dataclass
class Call:
    """One call of a module.

    Attributes:
        name: dotted name of the module in the traced root.
        module: the module of the traced root, never the copy that ran: copies end with their run, so nothing that
            their hooks hold may hold them.
        args: positional arguments, tensors detached and copied.
        kwargs: keyword arguments, likewise.
        tensors: the original tensors among the arguments, in order.
        output: its output, tensors detached and copied.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]
    output: Any = None


@dataclass
class Trace:
    """One forward of a module.

    Attributes:
        calls: first call of every module, by name, in the order in which the calls began.
        counts: number of calls per module.
        sources: per linear layer, names of the layers from whose outputs its input was computed.
        between: per linear layer, names of further parameters used on the way (norms on heads, biases).
        results: layers from whose outputs the module computed its own output, or a tensor in an attribute, with no
            other layer in between.
        loose: names of parameters used on the way to those results.
        on_inputs: layers whose input was computed from an input of the traced module that requires a gradient (see
            `trace`), with no other layer in between.
        roots: names of the modules that were run.
        used: names of parameters of layers that other code has used in any way, without a gradient too.
        replaced: names under which the forward has put other modules than it found.
    """

    calls: dict[str, Call] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    sources: dict[str, set[str]] = field(default_factory=dict)
    between: dict[str, set[str]] = field(default_factory=dict)
    results: set[str] = field(default_factory=set)
    loose: set[str] = field(default_factory=set)
    on_inputs: set[str] = field(default_factory=set)
    roots: list[str] = field(default_factory=lambda: [""])
    used: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)

    def readers(self, name: str) -> set[str]:
        """Layers whose input was computed from the output of ``name``."""
        return {reader for reader, sources in self.sources.items() if name in sources}

    def replay(self, name: str) -> Replay:
        """A replay of the first call of a module.

        Raises:
            LookupError: the module was not called, or is not called when its surroundings run again.
            Exception: any exception of the user's code before that call.
        """
        inside = (root for root in self.roots if lies_in(name, root) and root in self.calls)
        root = next(inside, None)
        if root is None:
            raise LookupError(f"{name!r} did not run on the tiny input")
        call = self.calls[root]
        return Replay(call.module, call.args, call.kwargs).at(relative(name, root))

    def input_of(self, name: str) -> Tensor:
        """The first tensor among the arguments of a layer."""
        return self.calls[name].tensors[0]


def relative(name: str, holder: str) -> str:
    """The name of a module relative to ``holder``, which contains it."""
    return name[len(holder) + 1 :] if holder else name


def trace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], inner: bool = False) -> Trace:
    """Record a forward of a copy of a module, in evaluation mode and with gradients enabled.

    Args:
        module: the module.
        args: positional arguments, tiny.
        kwargs: keyword arguments, tiny.
        inner: whether the module is part of a larger one, so that its inputs require gradients.

    Raises:
        Exception: any exception of the user's code on these arguments.
    """
    leaves: dict[int, Tensor] = {}
    if inner:
        args, leaves = _with_gradients(args)
    result, nodes = Trace(), Nodes()

    tagged = _tagged_names(module)
    found: _Names = {}
    alive: list[nn.Module] = []  # so that no other module gets an identity of theirs
    uses = contextlib.ExitStack()

    def watch(copied: nn.Module) -> None:
        noted.append(uses.enter_context(WeightUses(copied, tagged)))
        found.update({id(m): (name, module.get_submodule(name)) for name, m in copied.named_modules()})
        for parameter in copied.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        for m in copied.modules():
            alive.append(m)
            m.register_forward_pre_hook(_before(result, found, nodes, tagged), with_kwargs=True)
            m.register_forward_hook(_after(result, found, nodes, tagged), with_kwargs=True)

    noted: list[WeightUses] = []
    with torch.enable_grad(), uses:
        copied, output = Replay(module, args, kwargs).run(watch)
        uses.close()
        with contextlib.suppress(Exception), uses:  # code that cannot be trained so here
            Replay(module, args, kwargs).run(
                lambda copied: noted.append(uses.enter_context(WeightUses(copied, tagged))), training=True
            )
        result.used = set().union(*(each.used for each in noted))
        results = [x.grad_fn for x in tensors_left(copied, output) if x.grad_fn is not None]
    result.replaced = {name for name, m in copied.named_modules() if id(m) not in found}
    named = {id(parameter): name for name, parameter in copied.named_parameters()}
    for name, call in result.calls.items():
        if name in tagged and call.tensors:
            result.sources[name], met = nodes.reach(nodes.inputs(name))
            result.between[name] = {named[key] for key in met if key in named}
            if met.intersection(leaves):
                result.on_inputs.add(name)
    result.results, met = nodes.reach(results)
    result.loose = {named[key] for key in met if key in named}
    return result


def _with_gradients(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[int, Tensor]]:
    """Arguments that require gradients, like those of a layer inside a model, and their leaves, by id."""
    leaves = [x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
    given = [x.clone() if isinstance(x, Tensor) and x.requires_grad else x for x in leaves]
    return tuple(given), {id(x): x for x in leaves if isinstance(x, Tensor) and x.requires_grad}


_STATE = {"_parameters", "_buffers", "_modules"}


def tensors_left(module: nn.Module, output: Any) -> list[Tensor]:
    """Tensors in the output of a module, in attributes of its parts, and in attributes of objects found there."""
    kept = [value for m in module.modules() for key, value in vars(m).items() if key not in _STATE]
    leaves = tree_leaves([output, *kept])
    inner = [list(vars(x).values()) for x in leaves if not isinstance(x, (Tensor, nn.Module, type)) and _has_data(x)]
    return [x for x in [*leaves, *tree_leaves(inner)] if isinstance(x, Tensor)]


def _has_data(value: Any) -> bool:
    return hasattr(value, "__dict__") and not callable(value)


def is_tagged(module: nn.Module) -> bool:
    """Whether the module is a node of the graph of layers."""
    return is_splittable(module) or is_attention(module) or is_table(module)


def _tagged_names(module: nn.Module) -> set[str]:
    """Names of the nodes of the graph of layers; what is split like one layer is one node."""
    joined = [name for name, part in module.named_modules() if low_rank(part) or (name and divisible(part))]
    inside = {name for name, _ in module.named_modules() for outer in joined if name != outer and lies_in(name, outer)}
    return {name for name, part in module.named_modules() if name not in inside and is_tagged(part)}


_Names = dict[int, tuple[str, nn.Module]]
"""By the id of a part of the copy, its name and the part of the original that has this name."""


def _before(result: Trace, names: _Names, nodes: Nodes, tagged: set[str]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name, original = names[id(module)]
        result.counts[name] = result.counts.get(name, 0) + 1
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name not in result.calls:
            kept = tree_map(_copy, (args, dict(kwargs)))
            result.calls[name] = Call(name, original, kept[0], kept[1], tensors)
        if name in tagged:
            nodes.reads(name, tensors)

    return hook


def _after(result: Trace, names: _Names, nodes: Nodes, tagged: set[str]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name, _ = names[id(module)]
        if result.counts[name] == 1:
            result.calls[name].output = tree_map(_copy, output)
        if name in tagged:
            nodes.writes(name, output)

    return hook


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


class Nodes:
    """Autograd nodes of layer outputs, and a search from layer inputs back to the nearest of them."""

    def __init__(self) -> None:
        self._owner: dict[Any, str] = {}
        self._inputs: dict[str, list[Any]] = {}

    def reads(self, name: str, tensors: list[Tensor]) -> None:
        """Note the inputs of a call of layer ``name``."""
        edges = [x.grad_fn for x in tensors if x.grad_fn is not None]
        self._inputs.setdefault(name, []).extend(edges)

    def writes(self, name: str, output: Any) -> None:
        """Note the output of a call of layer ``name``."""
        for x in tree_leaves(output):
            if isinstance(x, Tensor) and x.grad_fn is not None:
                self._owner[x.grad_fn] = name
                if x._is_view() and x._base is not None:  # writing into a view gives it another node
                    self._owner[x._base.grad_fn] = name

    def inputs(self, name: str) -> list[Any]:
        """Nodes that computed the inputs of a layer."""
        return self._inputs.get(name, [])

    def reach(self, nodes: list[Any]) -> tuple[set[str], set[int]]:
        """Names of the nearest layers before ``nodes``, and ids of the parameters used on the way."""
        sources: set[str] = set()
        parameters: set[int] = set()
        for node in graph_behind(nodes, self._owner.__contains__):
            if node in self._owner:
                sources.add(self._owner[node])
            elif (variable := getattr(node, "variable", None)) is not None:
                parameters.add(id(variable))
        return sources, parameters
