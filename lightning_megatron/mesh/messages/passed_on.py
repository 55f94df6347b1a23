"""Messages of which every rank gets another one: to the next rank of a ring, and a block for each."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh.messages import exchange, transport
from lightning_megatron.mesh.messages.collectives import Started, wait_for


def raw_all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Block r of ``x``, contiguous, [group, ..], goes to rank r; gives the blocks that came, outside autograd."""
    if group.size() == 1:
        return x
    arrived = torch.empty_like(x)
    if exchange.exchanges(x, group):
        exchange.start_blocks(list(arrived.unbind()), list(x.unbind()), group).wait()
    else:
        wait_for(dist.all_to_all_single(arrived, x, group=group, async_op=True), "all_to_all", x, group)
    return arrived


def start_all_to_all_rows(
    x: Tensor, outgoing: list[int], incoming: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, Started]:
    """Rows of ``x``, [sum(outgoing), ..], to the ranks of ``group``, outside autograd.

    Args:
        x: rows for rank 0, then those for rank 1, ...
        outgoing: how many go to each rank.
        incoming: how many come from each rank: what that rank has as ``outgoing`` for this one.
        group: the ranks.

    Returns:
        [sum(incoming), ..], in the order of the ranks that they come from, and what is to be waited for before.
    """
    arrived = x.new_empty((sum(incoming), *x.shape[1:]))
    if exchange.exchanges(x, group, empty=True):
        blocks = list(arrived.split(incoming)), list(x.detach().contiguous().split(outgoing))
        return arrived, exchange.start_blocks(*blocks, group)
    return arrived, dist.all_to_all_single(arrived, x.contiguous(), incoming, outgoing, group=group, async_op=True)


def start_rotation(x: Tensor, length: int, group: dist.ProcessGroup) -> tuple[Tensor, list[Started]]:
    """Send ``x``, contiguous, [n, ..], to the next rank of a ring, outside autograd.

    Returns:
        What the rank before sends, [length, ..], and what is to be waited for before it, or ``x``, is used.
    """
    rank, size = group.rank(), group.size()
    arrived, operations = x.new_empty((length, *x.shape[1:])), []
    if exchange.exchanges(x, group, empty=True):
        under_way = [transport.send(group, x.detach(), (rank + 1) % size)] if x.numel() else []
        under_way += [transport.receive(group, arrived, (rank - 1) % size)] if arrived.numel() else []
        return arrived, list(under_way)
    if x.numel():
        operations.append(dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size))
    if arrived.numel():
        operations.append(dist.P2POp(dist.irecv, arrived, group=group, group_peer=(rank - 1) % size))
    return arrived, list(dist.batch_isend_irecv(operations)) if operations else []
