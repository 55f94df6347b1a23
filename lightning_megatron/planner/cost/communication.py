"""Communication time: ring collectives and transfers between stages, by size, group and the nodes of the group.

| name           | volume per rank          | used for                                                        |
|----------------|--------------------------|-----------------------------------------------------------------|
| all-reduce     | 2 (g-1)/g x bytes        | tensor parallelism without sequence parallelism; gradients       |
| all-gather     | (g-1)/g x bytes (whole)  | sequence parallelism, sharded weights                            |
| reduce-scatter | (g-1)/g x bytes (whole)  | sequence parallelism, sharded gradients                          |
| send           | bytes                    | pipeline boundaries                                              |
| all-to-all     | (g-1)/g x bytes (own)    | rows of tokens for experts, and heads for tokens                 |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_megatron.planner.model.cluster import Cluster
from lightning_megatron.planner.model.constants import Constants


@dataclass(frozen=True, slots=True)
class Group:
    """Size and spacing of a process group.

    Eight ranks with stride 4 on nodes of 8 GPUs: ranks 0 and 4 share a node, 8 and 12 the next: 2 per node, 4 nodes.

    Args:
        size: ranks in the group.
        stride: difference of the global ranks of neighbouring members.
        adapters: most network adapters per node that the software's rings use; None means one per member.
    """

    size: int
    stride: int = 1
    adapters: int | None = None

    def per_node(self, gpus_per_node: int) -> int:
        """Number of members on one node."""
        return max(1, min(self.size, gpus_per_node // self.stride))

    def nodes(self, gpus_per_node: int) -> int:
        """Number of nodes that the group spans."""
        return -(-self.size // self.per_node(gpus_per_node))


def bus_bandwidth(group: Group, cluster: Cluster, constants: Constants) -> float:
    """Bytes/s that a ring over ``group`` transfers through each member.

    Inside a node this is the NVLink bandwidth. Between nodes the members of the group on one node use their network
    adapters together. Congestion grows with the number of nodes, unless the software uses few adapters.
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
    """Latency of a ring in seconds: one hop per member, one of them between nodes per node.

    All-gather and reduce-scatter have no shorter route, so their latency grows with the group.
    """
    nodes = group.nodes(cluster.gpus_per_node)
    outside = nodes * cluster.network_latency if nodes > 1 else 0.0
    return outside + (group.size - nodes) * cluster.nvlink_latency


def tree_latency(group: Group, cluster: Cluster) -> float:
    """Latency in seconds of a reduction up a tree of nodes and a broadcast down, as used by small all-reduces."""
    per_node = group.per_node(cluster.gpus_per_node)
    nodes = group.nodes(cluster.gpus_per_node)
    return 2.0 * (per_node * cluster.nvlink_latency + math.log2(nodes) * cluster.network_latency)


def gather_seconds(
    size_bytes: float, group: Group, cluster: Cluster, constants: Constants, pieces: float = 1.0
) -> float:
    """Seconds of an all-gather or reduce-scatter.

    Args:
        size_bytes: bytes of the gathered tensor.
        group: of the collective.
        cluster, constants: bandwidths and latencies.
        pieces: number of collectives over which the tensor is split, each with the latency of a ring.
    """
    if group.size == 1:
        return 0.0
    volume = size_bytes * (group.size - 1) / group.size
    return volume / bus_bandwidth(group, cluster, constants) + pieces * ring_latency(group, cluster)


def all_reduce_seconds(size_bytes: float, group: Group, cluster: Cluster, constants: Constants) -> float:
    """Seconds of an all-reduce: volume of a reduce-scatter and an all-gather, latency of a ring or tree if shorter."""
    if group.size == 1:
        return 0.0
    volume = 2.0 * size_bytes * (group.size - 1) / group.size
    route = min(2.0 * ring_latency(group, cluster), tree_latency(group, cluster))
    return volume / bus_bandwidth(group, cluster, constants) + route


def exchange_seconds(size_bytes: float, group: Group, cluster: Cluster, constants: Constants) -> float:
    """Seconds of an all-to-all in which each member has ``size_bytes`` for all members, itself included.

    What stays in the node travels over NVLink, beside what leaves it through the member's own adapter.
    """
    if group.size == 1:
        return 0.0
    each, near = size_bytes / group.size, group.per_node(cluster.gpus_per_node)
    inside = (near - 1) * each / (cluster.nvlink * constants.nvlink)
    nodes = group.nodes(cluster.gpus_per_node)
    if nodes == 1:
        return inside + cluster.nvlink_latency
    decay = 1.0 + constants.network_decay * math.log2(nodes)
    outside = (group.size - near) * each * decay / (cluster.network * constants.network)
    return max(inside, outside) + cluster.network_latency


def send_seconds(size_bytes: float, stride: int, cluster: Cluster, constants: Constants) -> float:
    """Seconds of one transfer between ranks whose global ranks differ by ``stride``."""
    if stride < cluster.gpus_per_node:
        return size_bytes / (cluster.nvlink * constants.nvlink) + cluster.nvlink_latency
    return size_bytes / (cluster.network * constants.network) + cluster.network_latency
