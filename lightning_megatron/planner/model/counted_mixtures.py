"""Counts the sizes of a model with mixtures of experts from its parameters, where no configuration says them.

Which modules are experts is found by their structure elsewhere, and told by name. A layer with some is taken apart::

    layer ─┬─ attention and norms          everything outside of the module that holds the experts
           └─ mixture ─┬─ router           experts x hidden
                       ├─ experts          all alike
                       └─ shared expert    the rest
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_megatron.mesh.parts.names import lies_in, parent

if TYPE_CHECKING:
    from torch import Tensor, nn

Asked = Callable[[tuple[str, ...]], int | None]
_CHOSEN = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "topk")


@dataclass(frozen=True)
class MixtureLayer:
    """One layer that is a mixture.

    Attributes:
        experts: how many.
        expert: matrix elements of one of them.
        gated: whether an expert has a gate besides its up projection.
        beside: matrix elements in the module that holds the experts, but for them and the router.
        outside: matrix elements in the rest of the layer.
    """

    experts: int
    expert: int
    gated: bool
    beside: int
    outside: int


def trunk_of_mixtures(module: nn.Module, experts: Mapping[str, int]) -> str:
    """Name of the list of layers, with the most parameters, that has mixtures in its layers; "" without one.

    Args:
        module: the model.
        experts: name of each module of experts -> how many it has.
    """
    from torch import nn

    found = {
        name: sum(p.numel() for p in part.parameters())
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential)
        and len(part) > 1
        and not any(lies_in(name, other) for other in experts)
        and any(lies_in(other, name) for other in experts)
    }
    return max(found, key=lambda name: found[name], default="")


def mixture_fields(
    module: nn.Module, trunk: str, experts: Mapping[str, int], hidden: int, asked: Asked
) -> dict[str, Any]:
    """Fields of a :class:`~lightning_megatron.planner.model.shape.ModelShape` about layers and their experts.

    Layers may have different numbers of experts. Ranks share out those of every layer, so the shape has as many as all
    numbers are multiples of, each as wide as it takes for the parameters to be those of all experts.

    Args:
        module: the model.
        trunk: name of the list of layers.
        experts: name of each module of experts -> how many it has.
        hidden: width of tokens.
        asked: an integer attribute of the layers or of a configuration, by its possible names.

    Example:
        Two layers with 4 and 8 experts of width 16 are two with 4 experts of width 24.
    """
    layers = module.get_submodule(trunk)
    read = [_read(layer, _inside(f"{trunk}.{number}", experts), hidden) for number, layer in layers.named_children()]
    mixed = [each for each in read if isinstance(each, MixtureLayer)]
    dense = [each for each in read if isinstance(each, int)]
    alike = math.gcd(*(each.experts for each in mixed))
    gated = all(each.gated for each in mixed)
    row = hidden * (3 if gated else 2)
    total, outside = sum(each.experts * each.expert for each in mixed), _mean([each.outside for each in mixed])
    inner = max(1, round(total / (len(mixed) * alike * row)))
    return {
        "layers": len(read),
        "ffn": max(1, round((_mean(dense) - outside) / row)) if dense else inner,
        "gated": gated,
        "experts": alike,
        "top_k": min(alike, asked(_CHOSEN) or 2),
        "expert_inner": inner,
        "shared_inner": round(_mean([each.beside for each in mixed]) / row),
        "moe_layers": len(mixed),
        "attention_parameters": outside,
    }


def _mean(numbers: list[int]) -> int:
    return round(sum(numbers) / len(numbers))


def _inside(layer: str, experts: Mapping[str, int]) -> dict[str, int]:
    """Those of the modules of experts that lie in a layer, by their names in it."""
    return {name.removeprefix(f"{layer}."): n for name, n in experts.items() if lies_in(name, layer) and name != layer}


def _read(layer: nn.Module, experts: Mapping[str, int], hidden: int) -> MixtureLayer | int:
    """A layer's mixture with the most parameters; the layer's matrix elements where it has none."""
    whole = _elements(layer)
    if not experts:
        return whole
    name = max(experts, key=lambda each: _elements(layer.get_submodule(each)))
    group, count, above = layer.get_submodule(name), experts[name], parent(name)
    routed = _elements(group)
    # A mixture without a module of its own: what is not its experts or its router may be the attention.
    held = _elements(layer.get_submodule(above)) if above else routed + count * hidden
    beside, outside = max(0, held - routed - count * hidden), whole - held
    return MixtureLayer(count, routed // count, _gated(group), beside, outside)


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in _matrices(module))


def _matrices(module: nn.Module) -> list[Tensor]:
    return [parameter for parameter in module.parameters() if parameter.dim() > 1]


def _gated(experts: nn.Module) -> bool:
    """Whether an expert has three matrices, or two of which one has twice the elements of the other."""
    from torch import nn

    one = experts
    if isinstance(experts, nn.ModuleList | nn.ModuleDict):
        one = next(child for child in experts.children() if any(True for _ in child.parameters()))
    matrices = _matrices(one)
    deepest = max((matrix.dim() for matrix in matrices), default=0)
    sizes = sorted(matrix.numel() for matrix in matrices if matrix.dim() == deepest)
    return len(sizes) > 2 or (len(sizes) == 2 and sizes[1] == 2 * sizes[0])
