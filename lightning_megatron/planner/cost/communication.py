"""Time on the links: ring collectives and stage-to-stage transfers by size, group and what the group spans.

| name           | volume per rank          | used for                                                        |
|----------------|--------------------------|-----------------------------------------------------------------|
| all-reduce     | 2 (g-1)/g x bytes        | tensor parallelism without sequence parallelism; gradients       |
| all-gather     | (g-1)/g x bytes (whole)  | sequence parallelism, sharded weights                            |
| reduce-scatter | (g-1)/g x bytes (whole)  | sequence parallelism, sharded gradients                          |
| send           | bytes                    | pipeline boundaries                                              |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_megatron.planner.model.cluster import Cluster
from lightning_megatron.planner.model.constants import Constants


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as the links see it.

    Eight ranks with stride 4 on nodes of 8: ranks 0, 4 share a node, 8, 12 the next: 2 per node, 4 nodes.

    Args:
        size: ranks in the group.
        stride: distance of neighbouring members in global ranks.
        adapters: most network adapters of a node that the software's rings use; None means one per member there.
    """

    size: int
    stride: int = 1
    adapters: int | None = None

    def per_node(self, gpus_per_node: int) -> int:
        """Members on one node."""
        return max(1, min(self.size, gpus_per_node // self.stride))

    def nodes(self, gpus_per_node: int) -> int:
        """Nodes that the group spans."""
        return -(-self.size // self.per_node(gpus_per_node))


def bus_bandwidth(group: Group, cluster: Cluster, constants: Constants) -> float:
    """Bytes/s at which a ring over ``group`` moves data through each member.

    Inside a node this is NVLink. Between nodes a ring enters a node once per member it has there, so members of a group
    on one node add up their adapters; groups that interleave on the same nodes then have one adapter each. Congestion
    grows with the nodes, unless most adapters are idle.
    """
    inside = cluster.nvlink * constants.nvlink
    nodes = group.nodes(cluster.gpus_per_node)
    if nodes == 1:
        return inside
    outside = cluster.network * constants.network
    if group.adapters is not None:
        return min(inside, outside * min(group.adapters, group.per_node(cluster.gpus_per_node)))
    decay = 1.0 + constants.network_decay * math.log2(nodes)
    return min(inside, outside * group.per_node(cluster.gpus_per_node) / decay)


def ring_latency(group: Group, cluster: Cluster) -> float:
    """Seconds until a ring's first data has come around: one hop per member, each node left once.

    All-gather and reduce-scatter have no shorter route, so their latency grows with the group.
    """
    nodes = group.nodes(cluster.gpus_per_node)
    outside = nodes * cluster.network_latency if nodes > 1 else 0.0
    return outside + (group.size - nodes) * cluster.nvlink_latency


def tree_latency(group: Group, cluster: Cluster) -> float:
    """Seconds until data has gone up and down a tree of nodes; a small all-reduce takes this route."""
    per_node = group.per_node(cluster.gpus_per_node)
    nodes = group.nodes(cluster.gpus_per_node)
    return 2.0 * (per_node * cluster.nvlink_latency + math.log2(nodes) * cluster.network_latency)


def gather_seconds(
    size_bytes: float, group: Group, cluster: Cluster, constants: Constants, pieces: float = 1.0
) -> float:
    """Seconds of an all-gather or reduce-scatter.

    Args:
        size_bytes: bytes of the whole tensor.
        group: who takes part.
        cluster, constants: the links.
        pieces: messages that the tensor is sent in, each with the ring's latency.
    """
    if group.size == 1:
        return 0.0
    volume = size_bytes * (group.size - 1) / group.size
    return volume / bus_bandwidth(group, cluster, constants) + pieces * ring_latency(group, cluster)


def all_reduce_seconds(size_bytes: float, group: Group, cluster: Cluster, constants: Constants) -> float:
    """Seconds of an all-reduce: the volume of a reduce-scatter and an all-gather, and the shorter route's latency."""
    if group.size == 1:
        return 0.0
    volume = 2.0 * size_bytes * (group.size - 1) / group.size
    route = min(2.0 * ring_latency(group, cluster), tree_latency(group, cluster))
    return volume / bus_bandwidth(group, cluster, constants) + route


def send_seconds(size_bytes: float, stride: int, cluster: Cluster, constants: Constants) -> float:
    """Seconds of one transfer to the rank ``stride`` further on."""
    if stride < cluster.gpus_per_node:
        return size_bytes / (cluster.nvlink * constants.nvlink) + cluster.nvlink_latency
    return size_bytes / (cluster.network * constants.network) + cluster.network_latency
