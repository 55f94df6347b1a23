"""Heads and embeddings of the vocabulary: logits stay split, and embeddings tied to a head are split as well."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_megatron.parallelize.plan.blueprint import Blueprint
from lightning_megatron.parallelize.plan.styles import Style
from lightning_megatron.parallelize.reading.kinds import is_linear, is_table, linear_sizes, output_embeddings
from lightning_megatron.parallelize.reading.trace import Trace
from lightning_megatron.parallelize.trial.readers import holds, used_directly


def vocabulary_heads(module: nn.Module, styles: Mapping[str, Style], trace: Trace | None) -> set[str]:
    """Names of linear layers whose output features are the vocabulary and whose output no other layer reads."""
    tables = [m for m in module.modules() if is_table(m)]
    tied = {id(m.weight) for m in tables}
    split = {
        id(module.get_submodule(n).get_parameter("weight")) for n, s in styles.items() if s is Style.EMBEDDING_ROWWISE
    }
    largest = max((m.num_embeddings for m in tables), default=0)
    named = {id(m) for m in output_embeddings(module)}
    heads, exposed = set(), used_directly(module, trace) | _held_whole(module, styles, trace)
    for name, part in module.named_modules():
        if not is_linear(part):
            continue
        follows = id(part.get_parameter("weight")) in split  # tied to an embedding that the plan splits
        if styles and not follows and not styles.get(name, Style.REPLICATE).is_column:
            continue
        if trace is not None and (name not in trace.sources or trace.readers(name)):
            continue
        if holds(module, name, exposed):
            continue
        as_many = trace is not None and linear_sizes(part)[1] == largest
        if id(part) in named or id(part.get_parameter("weight")) in tied or as_many:
            heads.add(name)
    return heads


def split_vocabulary(module: nn.Module, blueprint: Blueprint) -> None:
    """Split heads and the embeddings tied to them, in the styles of the blueprint.

    Unless the plan is an argument or follows drop-in layers, an untied embedding of the same size is split as well.
    """
    weights = {id(module.get_submodule(name).get_parameter("weight")) for name in blueprint.heads}
    sizes = {linear_sizes(module.get_submodule(name))[1] for name in blueprint.heads}
    exposed = used_directly(module, blueprint.trace) | _held_whole(module, blueprint.styles, blueprint.trace)
    if blueprint.source in ("argument", "drop-in layers"):
        sizes = set()
    for name in blueprint.heads:
        blueprint.styles[name] = Style.COLWISE_GATHER_OUTPUT
    for name, part in module.named_modules():
        if not is_table(part) or part.sparse or part.max_norm is not None:
            continue
        if id(part.weight) in exposed:
            continue
        tied = id(part.weight) in weights
        read = blueprint.trace is None or name in blueprint.trace.calls
        if tied or (read and part.num_embeddings in sizes and _first_of_size(module, part)):
            blueprint.styles[name] = Style.EMBEDDING_ROWWISE


def _held_whole(module: nn.Module, styles: Mapping[str, Style], trace: Trace | None) -> set[int]:
    """Ids of the weights of linear layers that no run has reached and no plan names: they stay whole, and so must an
    embedding that shares one (the decoder of a masked language model, tied to its encoder's table).
    """
    met = set() if trace is None else trace.calls.keys() | trace.sources.keys()
    return {
        id(part.get_parameter("weight"))
        for name, part in module.named_modules()
        if trace is not None and is_linear(part) and name not in met and not styles.get(name, Style.REPLICATE).is_column
    }


def _first_of_size(module: nn.Module, part: nn.Embedding) -> bool:
    same = [m for m in module.modules() if is_table(m) and m.num_embeddings == part.num_embeddings]
    return same[0] is part
