"""Experts divided among ranks: each keeps its own, and the table says what that is."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron.experts.exchange.sending import Owners
from lightning_megatron.experts.kinds.inner_cut import InnerCut, with_block
from lightning_megatron.layers.table import ParameterSharding, ShardTable, apply_specs
from lightning_megatron.mesh.messages.collectives import raw_broadcast
from lightning_megatron.mesh.parts.boxes import ShardSpec


def leave_stacked(
    module: nn.Module, name: str, owners: Owners, table: ShardTable, here: InnerCut | None, dims: Mapping[str, int]
) -> None:
    """Keep a block of stacked experts, or a part of each.

    Args:
        module: of experts.
        name: of it.
        owners: who has which.
        table: filled.
        here: how each expert is cut, where it is.
        dims: of its parameters, where not the first one counts experts.
    """

    def spec(leaf: str, shape: torch.Size) -> ShardSpec:
        if here is None:
            dim = dims.get(leaf, 0)
            each = shape[dim] // owners.experts  # 1 where experts have a dim of their own
            return ShardSpec.along(shape, dim, [(owners.first * each, (owners.first + owners.local) * each)])
        return with_block(here.spec(leaf, (owners.local, *shape[1:])), shape[0], owners.first)

    own = {
        leaf: ParameterSharding(spec(leaf, parameter.shape), of_experts=True)
        for leaf, parameter in module.named_parameters()
    }
    apply_to_group(module, name, own, owners.group, table)


def leave_one(
    expert: nn.Module, name: str, number: int, owners: Owners, table: ShardTable, inner: InnerCut | None
) -> None:
    """Keep one expert of a list, or a part of it, on the rank that holds it, and nothing of it on the others."""
    is_here = owners.first <= number < owners.first + owners.local
    own = {}
    for leaf, parameter in expert.named_parameters():
        nothing = ShardSpec(tuple(parameter.shape), (0, *parameter.shape[1:]), ())
        shape = tuple(parameter.shape)
        here = ShardSpec.whole(shape) if inner is None else inner.spec(leaf, shape)
        own[leaf] = ParameterSharding(here if is_here else nothing, of_experts=True)
    apply_to_group(expert, name, own, owners.group, table)


def apply_to_group(
    module: nn.Module,
    name: str,
    own: Mapping[str, ParameterSharding],
    group: dist.ProcessGroup,
    table: ShardTable,
) -> None:
    """Give all ranks the values of the first one, then leave each its part.

    Args:
        module: of experts.
        name: of it.
        own: what this rank keeps of its parameters.
        group: the ranks.
        table: filled.
    """
    for leaf in own:
        parameter = module.get_parameter(leaf)
        if not parameter.is_meta:
            values = parameter.data.contiguous()
            raw_broadcast(values, dist.get_global_rank(group, 0), group)
            parameter.data = values
    apply_specs(module, own)
    table.update({f"{name}.{leaf}" if name else leaf: sharding for leaf, sharding in own.items()})
