"""A second process group of the same ranks, in which messages do not meet those of the first."""

from __future__ import annotations

from typing import cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_megatron.mesh.default_group import whole_world
from lightning_megatron.mesh.messages import objects


def further_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A new group of the ranks of another one; collective over them, and not over the world.

    torch names such a group by its ranks and by how many groups a rank has. Ranks that have fewer than others (one of
    tied weights has one of the first and the last stage) would wait for each other under different names, so they make
    groups of their own until all have as many.

    Args:
        group: of all ranks that call this.
    """
    most = max(objects.gather(_count(), group))
    with whole_world():
        while _count() < most:
            dist.new_group([dist.get_rank()], use_local_synchronization=True)
        ranks = sorted(dist.get_process_group_ranks(group))
        return cast("dist.ProcessGroup", dist.new_group(ranks, use_local_synchronization=True))


def _count() -> int:
    return len(distributed_c10d._world.pg_names)
