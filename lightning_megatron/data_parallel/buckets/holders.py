"""The ranks that hold the parameters of a bucket, and how the optimizer's work is sharded over them.

All ranks of ``group`` hold the same parameters. With sharding each rank also owns one shard: it reduces that shard of
the gradients, keeps its optimizer state and updates it. Over several nodes, shards may be spread inside a node and
replicated on every other node, so that weights are all-gathered over the fast links only. Example, 8 replicas,
``{"shard": 4}``::

    shard group   0 1 2 3 │ 4 5 6 7        reduce-scatter gradients, all-gather weights
    copy group    0 4 │ 1 5 │ 2 6 │ 3 7    all-reduce the shard's gradient
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_megatron.mesh.mesh import Holders, ParallelMesh

OptimizerSharding = bool | Mapping[str, int]


@dataclass(frozen=True)
class Sharing:
    """The ranks that hold some parameters, seen from this rank.

    Attributes:
        group: process group of all ranks that hold them; ``None`` if no other rank does.
        shards: number of ranks over which one copy of the optimizer's state is spread; 1 without sharding.
        rank: index of this rank's shard.
        shard_group: process group of the ranks that hold the shards of one copy; ``None`` without sharding.
        copy_group: process group of the ranks with the same shard; ``None`` if there is only one copy.
        copy: index of this rank's copy.
        spans_stages: whether other pipeline stages hold them too (tied embeddings).
        spans_tensor: whether all tensor-parallel ranks are in ``group``, each with a partial sum of the gradient.
    """

    group: Any = None
    shards: int = 1
    rank: int = 0
    shard_group: Any = None
    copy_group: Any = None
    copy: int = 0
    spans_stages: bool = False
    spans_tensor: bool = False

    @classmethod
    def of_group(cls, group: Any, *, sharded: bool, holders: Holders | None = None) -> Sharing:
        """Shard one copy of the optimizer's state over all ranks of ``group``, or let each rank keep its own."""
        stages, tensor = (len(holders.stages) > 1, holders.over_tensor) if holders is not None else (False, False)
        if not sharded:
            return cls(group, spans_stages=stages, spans_tensor=tensor)
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        return cls(group, size, rank, group, spans_stages=stages, spans_tensor=tensor)


def check_sharding(sharding: object) -> None:
    """Refuse invalid values of ``optimizer_sharding``.

    Raises:
        ValueError: neither a bool nor a dict with ``"shard"``, ``"elementwise"`` or both.
    """
    if isinstance(sharding, bool):
        return
    options = dict(sharding) if isinstance(sharding, Mapping) else {}
    size, declared = options.pop("shard", 1), options.pop("elementwise", True)
    known = isinstance(sharding, Mapping) and sharding and not options and isinstance(declared, bool)
    if not known or not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(
            f"`optimizer_sharding={sharding!r}` must be True, False, or a dict with one or both of: 'shard', how many "
            "replicas one copy of the optimizer's state is spread over; 'elementwise', False if the optimizer "
            "needs whole parameters."
        )


def declared_elementwise(sharding: OptimizerSharding) -> bool | None:
    """Whether the user declares that the optimizer updates every element by itself; ``None`` if not declared."""
    return bool(sharding["elementwise"]) if isinstance(sharding, Mapping) and "elementwise" in sharding else None


def data_sharing(mesh: ParallelMesh, sharding: OptimizerSharding) -> Sharing:
    """How the optimizer is sharded over the replicas of a stage; collective over the world.

    Raises:
        ValueError: the number of shards does not divide the number of replicas.
    """
    replicas = mesh.layout.data
    if replicas == 1:
        return Sharing()
    group = mesh.group("data_parallel")
    size = sharding.get("shard", replicas) if isinstance(sharding, Mapping) else replicas if sharding else 1
    if replicas % size:
        fitting = [n for n in range(1, replicas + 1) if replicas % n == 0]
        raise ValueError(
            f"`optimizer_sharding={{'shard': {size}}}` does not divide `data_parallel_size={replicas}`; use one of "
            f"{fitting}."
        )
    if size in (1, replicas):
        return Sharing.of_group(group, sharded=size > 1)
    shard_group, copy_group = _subgroups(mesh, size)
    place = mesh.coordinates.data
    return Sharing(group, size, place % size, shard_group, copy_group, place // size)


def _subgroups(mesh: ParallelMesh, size: int) -> tuple[Any, Any]:
    """This rank's group of ``size`` neighbouring replicas, and its group of replicas with the same index in theirs.

    Two calls of ``new_subgroups_by_enumeration``, whatever the size of the world.
    """
    layout = mesh.layout
    others = [
        (tensor, context, pipeline)
        for pipeline in range(layout.pipeline)
        for context in range(layout.context)
        for tensor in range(layout.tensor)
    ]
    lines = [
        [layout.rank(tensor=t, context=c, data=data, pipeline=p) for data in range(layout.data)] for t, c, p in others
    ]
    inside = [line[start : start + size] for line in lines for start in range(0, layout.data, size)]
    across = [line[place::size] for line in lines for place in range(size)]
    shard_group, _ = dist.new_subgroups_by_enumeration(inside)
    copy_group, _ = dist.new_subgroups_by_enumeration(across)
    return shard_group, copy_group
