"""Who holds the parameters of a bucket, and how they share the optimizer's work.

Every rank of ``group`` holds the same parameters. With sharding each also owns one shard of them: its part of the
gradient's sum, of the optimizer's state and of the update. Over nodes the shards may be kept inside a node and
repeated in every other one, so that weights are gathered over the fast links only. Example, 8 replicas,
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
    """Holders of some parameters, seen from this rank.

    Attributes:
        group: all that hold them; ``None`` if nobody else does.
        shards: ranks that share one copy of the optimizer's state; 1 without sharding.
        rank: this rank's shard.
        shard_group: the ranks of those shards.
        copy_group: ranks with the same shard; ``None`` if there is only one copy.
        copy: which copy this rank's is.
        spans_stages: whether other pipeline stages hold them too (tied embeddings).
        spans_tensor: whether all tensor-parallel ranks are in ``group``, each with a part of the gradient.
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
        """All ranks of ``group`` share one copy, or each keeps its own."""
        stages, tensor = (len(holders.stages) > 1, holders.over_tensor) if holders is not None else (False, False)
        if not sharded:
            return cls(group, spans_stages=stages, spans_tensor=tensor)
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        return cls(group, size, rank, group, spans_stages=stages, spans_tensor=tensor)


def check_sharding(sharding: object) -> None:
    """Refuse values that cannot be meant.

    Raises:
        ValueError: neither a truth value nor a dict with ``"shard"``, ``"elementwise"`` or both.
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
    """What the user says of the optimizer: whether it updates every element by itself; ``None`` if nothing."""
    return bool(sharding["elementwise"]) if isinstance(sharding, Mapping) and "elementwise" in sharding else None


def data_sharing(mesh: ParallelMesh, sharding: OptimizerSharding) -> Sharing:
    """How the replicas of a stage share the optimizer; collective over the world.

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
    """Groups of ``size`` neighbouring replicas, and of those with the same place in them: two calls, whatever the
    size of the world.
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
