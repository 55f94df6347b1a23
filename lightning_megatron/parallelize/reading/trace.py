"""Reads a module in execution order: which linear layers feed which, with what, inside which calls.

The module runs once on a tiny input. Every call is recorded; autograd's graph of the outputs then tells, for each
linear layer, the linear layers whose outputs its input was computed from, with nothing but parameter-free code,
norms and the like in between. That, and not the order of registration or any name, is what pairs column- with
row-parallel layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_megatron.parallelize.reading.kinds import is_attention, is_linear


@dataclass
class Call:
    """One call of a module.

    Attributes:
        name: dotted name of the module in the traced root.
        module: the module.
        args: positional arguments, tensors detached and copied.
        kwargs: keyword arguments, likewise.
        tensors: the original tensors among the arguments, in order.
        output: what it returned, tensors detached and copied.
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
        sources: per linear layer, names of the layers whose outputs its input was computed from.
        between: per linear layer, names of further parameters met on the way (norms on heads, biases).
        results: layers from whose outputs the module computed what it returned, or left in an attribute, with no other
            layer in between.
        loose: names of parameters met on the way to those results.
        on_inputs: layers whose input was computed from a tensor that the traced module was given, which may carry a
            gradient (see `trace`), with no further layer in between.
        roots: names of the modules that were run.
    """

    calls: dict[str, Call] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    sources: dict[str, set[str]] = field(default_factory=dict)
    between: dict[str, set[str]] = field(default_factory=dict)
    results: set[str] = field(default_factory=set)
    loose: set[str] = field(default_factory=set)
    on_inputs: set[str] = field(default_factory=set)
    roots: list[str] = field(default_factory=lambda: [""])

    def readers(self, name: str) -> set[str]:
        """Layers whose input was computed from the output of ``name``."""
        return {reader for reader, sources in self.sources.items() if name in sources}

    def input_of(self, name: str) -> Tensor:
        """The tensor a layer read first."""
        return self.calls[name].tensors[0]


def trace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], inner: bool = False) -> Trace:
    """Record what happens when a module is called (in evaluation mode, gradients on).

    The parameters themselves stay out of the graph: aliases take their place for the call, so that nothing that the
    module keeps of the run ties its parameters to their present shapes.

    Args:
        module: the module; left as it was.
        args: positional arguments, tiny.
        kwargs: keyword arguments, tiny.
        inner: whether the module is a part of something larger, so that its inputs carry gradients.
    """
    leaves: dict[int, Tensor] = {}
    if inner:
        args, leaves = _with_gradients(args)
    result, nodes = Trace(), _Nodes()
    names = {id(m): name for name, m in module.named_modules()}
    aliases = {name: p.detach().requires_grad_(p.is_floating_point()) for name, p in module.named_parameters()}
    with prepared(module), torch.enable_grad():
        handles = []
        for m in module.modules():
            handles.append(m.register_forward_pre_hook(_before(result, names, nodes), with_kwargs=True))
            handles.append(m.register_forward_hook(_after(result, names, nodes), with_kwargs=True))
        try:
            # Not `tie_weights=True`: of a module that is in several places it would leave an alias behind.
            output = torch.func.functional_call(module, _everywhere(module, aliases), args, kwargs, tie_weights=False)
        finally:
            for handle in handles:
                handle.remove()
        results = [x.grad_fn for x in tensors_left(module, output) if x.grad_fn is not None]
    named = {id(alias): parameter for parameter, alias in aliases.items()}
    for name, call in result.calls.items():
        if is_tagged(call.module) and call.tensors:
            result.sources[name], met = nodes.reach(nodes.inputs(name))
            result.between[name] = {named[key] for key in met if key in named}
            if met.intersection(leaves):
                result.on_inputs.add(name)
    result.results, met = nodes.reach(results)
    result.loose = {named[key] for key in met if key in named}
    return result


def _with_gradients(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[int, Tensor]]:
    """Arguments that carry gradients, as a layer's do inside a model, and the leaves they come from, by id."""
    leaves = [x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
    given = [x.clone() if isinstance(x, Tensor) and x.requires_grad else x for x in leaves]
    return tuple(given), {id(x): x for x in leaves if isinstance(x, Tensor) and x.requires_grad}


_STATE = {"_parameters", "_buffers", "_modules"}


def tensors_left(module: nn.Module, output: Any) -> list[Tensor]:
    """Tensors in what a module returned and in the attributes of its parts, and in those of objects found there."""
    kept = [value for m in module.modules() for key, value in vars(m).items() if key not in _STATE]
    leaves = tree_leaves([output, *kept])
    inner = [list(vars(x).values()) for x in leaves if not isinstance(x, (Tensor, nn.Module, type)) and _has_data(x)]
    return [x for x in [*leaves, *tree_leaves(inner)] if isinstance(x, Tensor)]


def fresh(value: Any) -> Any:
    """A copy of an argument that a call may write into."""
    return value.clone() if isinstance(value, Tensor) else value


def _has_data(value: Any) -> bool:
    return hasattr(value, "__dict__") and not callable(value)


def _everywhere(module: nn.Module, aliases: dict[str, Tensor]) -> dict[str, Tensor]:
    """The aliases under each name of a tied parameter, and one name of each module."""
    of_parameter = {id(parameter): aliases[name] for name, parameter in module.named_parameters()}
    found: dict[str, Tensor] = {}
    for name, part in module.named_modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                found[f"{name}.{key}" if name else key] = of_parameter[id(parameter)]
    return found


def is_tagged(module: nn.Module) -> bool:
    """Whether the module is a node of the graph of layers."""
    return is_linear(module) or is_attention(module) or isinstance(module, nn.Embedding)


def _before(result: Trace, names: dict[int, str], nodes: _Nodes) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = names[id(module)]
        result.counts[name] = result.counts.get(name, 0) + 1
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name not in result.calls:
            kept = tree_map(_copy, (args, dict(kwargs)))
            result.calls[name] = Call(name, module, kept[0], kept[1], tensors)
        if is_tagged(module):
            nodes.reads(name, tensors)

    return hook


def _after(result: Trace, names: dict[int, str], nodes: _Nodes) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = names[id(module)]
        if result.counts[name] == 1:
            result.calls[name].output = tree_map(_copy, output)
        if is_tagged(module):
            nodes.writes(name, output)

    return hook


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


class _Nodes:
    """Autograd nodes of layer outputs, and a search back from layer inputs to the nearest of them."""

    def __init__(self) -> None:
        self._owner: dict[Any, str] = {}
        self._inputs: dict[str, list[Any]] = {}

    def reads(self, name: str, tensors: list[Tensor]) -> None:
        edges = [x.grad_fn for x in tensors if x.grad_fn is not None]
        self._inputs.setdefault(name, []).extend(edges)

    def writes(self, name: str, output: Any) -> None:
        for x in tree_leaves(output):
            if isinstance(x, Tensor) and x.grad_fn is not None:
                self._owner[x.grad_fn] = name
                if x._is_view() and x._base is not None:  # writing into a view gives it another node
                    self._owner[x._base.grad_fn] = name

    def inputs(self, name: str) -> list[Any]:
        """Nodes that a layer's inputs came from."""
        return self._inputs.get(name, [])

    def reach(self, nodes: list[Any]) -> tuple[set[str], set[int]]:
        """Names of the nearest layers before some nodes, and the parameters met on the way."""
        sources: set[str] = set()
        parameters: set[int] = set()
        seen, stack = set(), list(nodes)
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self._owner:
                sources.add(self._owner[node])
                continue
            variable = getattr(node, "variable", None)
            if variable is not None:
                parameters.add(id(variable))
            stack.extend(parent for parent, _ in node.next_functions if parent is not None)
        return sources, parameters


@contextlib.contextmanager
def prepared(module: nn.Module) -> Iterator[None]:
    """Evaluation mode; modes and states are restored afterwards, and random numbers are not consumed."""
    modes = {m: m.training for m in module.modules()}
    before = {m: (_state_of(vars(m)), _state_of(m._buffers)) for m in modes}
    with torch.random.fork_rng(devices=[]), quiet_fast_paths():
        try:
            for m in modes:
                m.training = False
            yield
        finally:
            for m, mode in modes.items():
                for now, then in zip((vars(m), m._buffers), before[m], strict=True):
                    _put_back(now, then)
                m.training = mode


def _state_of(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Values, and copies of those that a run may write into: lists and dicts that are the module's own."""
    own = {key: value for key, value in attributes.items() if not key.startswith("_") and type(value) in (list, dict)}
    return {key: (value, own[key].copy() if key in own else None) for key, value in attributes.items()}


def _put_back(now: dict[str, Any], then: dict[str, tuple[Any, Any]]) -> None:
    """Undo what a run has left in a module: states, caches, counts; what it built without tensors may stay."""
    for key, value in list(now.items()):
        if key not in then:
            if any(isinstance(x, Tensor) for x in tree_leaves(value)):
                del now[key]
            continue
        old, content = then[key]
        if old is not value:
            now[key] = old
        if isinstance(old, list) and content is not None:
            old[:] = content
        elif isinstance(old, dict) and content is not None:
            old.clear()
            old.update(content)


@contextlib.contextmanager
def quiet_fast_paths() -> Iterator[None]:
    """Keep torch's fused encoder kernels, which call no submodules, out of the way."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
