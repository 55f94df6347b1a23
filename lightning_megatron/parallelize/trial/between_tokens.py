"""Finds the modules inside of a layer that need all tokens, where the layer does not work on a part of them.

A layer may mix tokens outside of the regions that the plan splits. The outermost modules that do so are given all
tokens on every rank; what is left of the layer (norms, dropout, residual additions) keeps its part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_megatron.mesh.parts.names import lies_in, parent
from lightning_megatron.parallelize.plan.blueprint import Blueprint
from lightning_megatron.parallelize.plan.styles import Style
from lightning_megatron.parallelize.reading.trace import Call, Trace


@dataclass(frozen=True)
class AllTokens:
    """Inputs and outputs with tokens, of a module that is given all tokens.

    Attributes:
        given: places or names of the arguments that are this tensor.
        left: indices of the leaves of its output.
    """

    given: tuple[int | str, ...]
    left: tuple[int, ...]


def candidates(blueprint: Blueprint, trace: Trace, layer: str, part: Callable[[Any], Any]) -> dict[str, AllTokens]:
    """The outermost modules of a layer that are called once, with tokens, and give as many.

    Args:
        blueprint: regions and styles of the traced module.
        trace: its trace.
        layer: name of the layer.
        part: cuts every hidden state in a value to some of its tokens.
    """
    found: dict[str, AllTokens] = {}
    waiting = [f"{layer}.{name}" for name, _ in trace.calls[layer].module.named_children()]
    while waiting:
        name = waiting.pop(0)
        call = trace.calls.get(name)
        if call is None:  # a list or a dictionary of modules
            waiting += [f"{name}.{child}" for child, _ in _module(trace, layer, name).named_children()]
        elif trace.counts[name] == 1 and _encloses(blueprint, name) and (tokens := _tokens_of(call, part)) is not None:
            found[name] = tokens
    return found


def _module(trace: Trace, layer: str, name: str) -> nn.Module:
    return trace.calls[layer].module.get_submodule(name[len(layer) + 1 :])


def _encloses(blueprint: Blueprint, name: str) -> bool:
    """Whether each region lies in the module or outside of it, and it has no attention that is split as one module."""
    if any(style is Style.HEADS and lies_in(each, name) for each, style in blueprint.styles.items()):
        return False
    inside = [[lies_in(parent(each), name) for each in region.members] for region in blueprint.regions]
    return all(all(members) or not any(members) for members in inside) and not any(
        name in region.members for region in blueprint.regions
    )


def _tokens_of(call: Call, part: Callable[[Any], Any]) -> AllTokens | None:
    """The first argument with tokens [batch, seq, ..], and what of the output has them; ``None`` if either is none."""
    named: dict[Any, Any] = {**dict(enumerate(call.args)), **call.kwargs}
    given = next((key for key, x in named.items() if isinstance(x, Tensor) and _has_tokens(x, part)), None)
    leaves = tree_leaves(call.output)
    left = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and _has_tokens(leaf, part)]
    if given is None or not left or any(leaves[index].dim() != 3 for index in left) or named[given].dim() != 3:
        return None
    originals = iter(call.tensors)  # an argument may hold several
    found = {key: [next(originals) for leaf in tree_leaves(x) if isinstance(leaf, Tensor)] for key, x in named.items()}
    same = [key for key, x in named.items() if isinstance(x, Tensor) and found[key][0] is found[given][0]]
    return AllTokens(tuple(same), tuple(left))


def _has_tokens(x: Tensor, part: Callable[[Any], Any]) -> bool:
    return x.is_floating_point() and bool(part(x).shape != x.shape)


def other_tokens(call: Call, tokens: AllTokens, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a module is given a part of something else than the tokens that are gathered for it.

    Args:
        call: its recorded call, with all tokens.
        tokens: what is gathered.
        args: positional arguments of a call with a part of them.
        kwargs: keyword arguments likewise.
    """
    named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    recorded: dict[Any, Any] = {**dict(enumerate(call.args)), **call.kwargs}
    for key, value in named.items():
        if key not in tokens.given:
            for got, want in zip(tree_leaves(value), tree_leaves(recorded.get(key)), strict=False):
                if isinstance(got, Tensor) and isinstance(want, Tensor) and got.shape != want.shape:
                    return True
    return False
