"""Selects the parameters that are spread over the replicas, and assigns them to the windows of modules.

A parameter lies in the window of its layer; outside of layers, in that of the module that holds it (an embedding, a
head). One that several modules hold (a tied head) has a window that each of them opens. ::

    embed.weight, head.weight (tied)   "embed and head"    opened by both
    layers.0.*                         "layers.0"          by the layer
    pos (of the module itself)         none: whole         as no forward tells when it is needed
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from lightning_megatron.data_parallel.buckets.bucket import Bucket, WeightLayout, make_bucket
from lightning_megatron.data_parallel.buckets.filling import fill
from lightning_megatron.data_parallel.buckets.holders import Sharing
from lightning_megatron.mesh.parts.names import Parts, lies_in, parent

_LEAST = 10  # a part outside of layers is worth its gathers if it has a tenth of the largest layer's weights


@dataclass
class Spread:
    """Parameters by name, and the window that each lies in.

    Attributes:
        trained: those with gradients.
        frozen: those without.
        modules: by name of a window, in order, the names of the modules that open it.
    """

    trained: dict[str, str] = field(default_factory=dict)
    frozen: dict[str, str] = field(default_factory=dict)
    modules: dict[str, list[str]] = field(default_factory=dict)


def spread_parameters(module: nn.Module, layers: Sequence[str], shared: Collection[str]) -> Spread:
    """The parameters of a module that are spread.

    Args:
        module: holds the layers.
        layers: their names; without any, nothing is spread.
        shared: names of parameters that other stages hold too.
    """
    if not layers:
        return Spread()
    parts, homes = Parts(layers), defaultdict[int, list[str | None]](list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        home = parts.of(name) or _holder(module, name, layers)
        if home not in homes[id(parameter)]:
            homes[id(parameter)].append(home)
    own = [(n, p, tuple(h for h in homes[id(p)] if h is not None)) for n, p in module.named_parameters()]
    sizes: Counter[tuple[str, ...]] = Counter()
    for _, parameter, modules in own:
        sizes[modules] += parameter.numel()
    largest = max((size for modules, size in sizes.items() if any(home in parts for home in modules)), default=0)
    spread = Spread()
    for name, parameter, modules in own:
        small = all(home not in parts for home in modules) and sizes[modules] * _LEAST < largest
        if None in homes[id(parameter)] or small or name in shared:
            continue
        if not parameter.requires_grad and not (type(parameter) is nn.Parameter and parameter.is_floating_point()):
            continue  # packed weights of few bits, which their library reads by itself
        window = " and ".join(modules)
        (spread.trained if parameter.requires_grad else spread.frozen)[name] = window
        spread.modules[window] = list(modules)
    return spread


def frozen_buckets(
    parameters: Mapping[str, nn.Parameter],
    frozen: Mapping[str, str],
    sharing: Sharing,
    bucket_bytes: int,
    hidden: frozenset[str] = frozenset(),
) -> list[Bucket]:
    """Buckets of weights without gradients, of which a rank keeps its shard.

    Args:
        parameters: by name; only those of ``frozen`` are taken.
        frozen: name -> window.
        sharing: the ranks that share them out.
        bucket_bytes: buffer size in bytes at which a new bucket starts.
        hidden: see :class:`.WeightLayout`.
    """
    runs = fill(((name, parameters[name]) for name in frozen), bucket_bytes, {}, frozen)
    layout = WeightLayout(rounds=False, hidden=hidden)
    return [make_bucket(members, sharing, shared=False, apart=True, layout=layout) for members in runs]


def _holder(module: nn.Module, name: str, layers: Sequence[str]) -> str | None:
    """The module outside of layers that holds a parameter, if its forward tells when the parameter is needed."""
    holder = parent(name)
    around = not holder or any(lies_in(layer, holder) for layer in layers)
    runs = type(module.get_submodule(holder)).forward is not nn.Module.forward
    return None if around or not runs else holder
