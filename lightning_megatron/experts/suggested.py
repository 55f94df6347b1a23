"""Plans for mixtures that are found neither by structure nor by a list: products of all tokens with stacked weights.

Experts by ``einsum`` over a mask of chosen ones (GShard's way), soft mixtures, mixtures of adapters, weights in a
``nn.ParameterList``, experts of unlike widths, and lists without a router (chosen by a table of words) compute in one
module with all experts. Which rows go to which of them, their code does not say, but their weights can be distributed,
and gathered when the module is called.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from typing import Any

from torch import nn

from lightning_megatron.mesh.parts.packages import comes_from


def suggested_plan(module: nn.Module, size: int) -> dict[str, Any]:
    """A plan by which weights of what may be experts are gathered; empty if nothing looks like them.

    Args:
        module: the whole.
        size: over how many ranks.

    Example:
        ``{"layers.*.mixture": "gathered"}`` for layers with ``mixture.up`` [experts, width, inner] and ``mixture.down``
        [experts, inner, width].
    """
    plan: dict[str, Any] = {}
    for name, child in module.named_modules():
        if not name or comes_from(type(child), "torch"):
            continue
        pattern = _pattern(name)
        listed = [leaf for leaf, each in child.named_children() if _holds_weights_of_each(each, size)]
        listed += [leaf for leaf, each in child.named_children() if _lists_experts(leaf, each, size)]
        stacked = [leaf for leaf, p in child.named_parameters(recurse=False) if p.dim() > 2]
        counts = Counter(child.get_parameter(leaf).shape[0] for leaf in stacked)
        if listed:
            dims = dict.fromkeys((f"{pattern}.{leaf}.{key}" for leaf in listed for key in _keys(child, leaf)), 0)
            plan |= {pattern: "gathered", **dims, **{f"{pattern}.{leaf}": 0 for leaf in stacked}}
        elif all(count % size == 0 for count in counts) and (
            any(many > 1 for many in counts.values()) or _chooses_among(child, counts)
        ):
            plan[pattern] = "gathered"
    return plan


def _chooses_among(child: nn.Module, counts: Collection[int]) -> bool:
    """Whether a module has a router with an output for each of what its stacked weights count."""
    routers = (each for each in child.children() if isinstance(each, nn.Linear))
    return any(router.out_features in counts for router in routers)


def _lists_experts(name: str, child: nn.Module, size: int) -> bool:
    """Whether a list of modules is called that of experts, of which each has weights that ranks can share out."""
    if "expert" not in name.lower() or not isinstance(child, nn.ModuleList | nn.ModuleDict) or len(child) < 2:
        return False
    weights = list(child.parameters())
    return bool(weights) and all(weight.dim() > 0 and weight.shape[0] % size == 0 for weight in weights)


def _pattern(name: str) -> str:
    """A name with all numbers of layers in it."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def _keys(child: nn.Module, leaf: str) -> list[str]:
    """Names of parameters in one of its lists, with all numbers of experts in them."""
    held = child.get_submodule(leaf)
    lists_weights = isinstance(held, nn.ParameterList | nn.ParameterDict)
    return ["*"] if lists_weights else [_pattern(key) for key, _ in held.named_parameters()]


def _holds_weights_of_each(child: nn.Module, size: int) -> bool:
    """Whether a list of parameters has one matrix for each of several experts."""
    if not isinstance(child, nn.ParameterList | nn.ParameterDict):
        return False
    weights = list(child.parameters())
    shapes = {weight.shape for weight in weights}
    return len(weights) > 1 and len(shapes) == 1 and all(len(shape) > 1 and shape[0] % size == 0 for shape in shapes)
