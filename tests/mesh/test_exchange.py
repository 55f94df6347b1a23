"""Collectives made of messages give what gloo's give, and the same bits on every rank."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from lightning_megatron.mesh.messages import exchange, host_peers
from lightning_megatron.mesh.messages.collectives import raw_all_reduce, start_flat_gather, start_flat_scatter
from lightning_megatron.mesh.messages.passed_on import raw_all_to_all, start_all_to_all_rows, start_rotation
from tests.harness import run_on_mesh
from tests.harness.twins import tensor_group


def _collectives(mesh: DeviceMesh, dtype: torch.dtype, in_memory: bool) -> list[torch.Tensor]:
    group = tensor_group(mesh)
    if in_memory:
        host_peers.open_peers()
    assert host_peers.reaches(group, 48) == in_memory
    own, size = group.rank(), group.size()
    everyone = [torch.randn(size, 6, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(size)]
    x, total = everyone[own], torch.stack([e.double() for e in everyone]).sum(0)
    assert exchange.exchanges(x, group)

    gathered = x.clone()
    start_flat_gather(gathered.view(-1), gathered[own], group).wait()
    torch.testing.assert_close(gathered, torch.stack([e[rank] for rank, e in enumerate(everyone)]), rtol=0, atol=0)
    apart = torch.empty_like(gathered)
    start_flat_gather(apart.view(-1), x[own], group).wait()
    torch.testing.assert_close(apart, gathered, rtol=0, atol=0)

    scattered, inside = torch.empty_like(x[own]), x.clone()
    start_flat_scatter(scattered, x.view(-1), group).wait()
    start_flat_scatter(inside[own], inside.view(-1), group).wait()
    tolerance = {"rtol": torch.finfo(dtype).eps * size, "atol": torch.finfo(dtype).eps * size}
    torch.testing.assert_close(scattered.double(), total[own], **tolerance)
    torch.testing.assert_close(inside[own], scattered, rtol=0, atol=0)

    before = x.clone()
    summed = raw_all_reduce(x.t(), group)
    torch.testing.assert_close(x, before, rtol=0, atol=0)
    torch.testing.assert_close(summed.double(), total.t(), **tolerance)
    largest = raw_all_reduce(x, group, maximum=True)
    torch.testing.assert_close(largest, torch.stack(everyone).amax(0), rtol=0, atol=0)

    exchanged = raw_all_to_all(x, group)
    torch.testing.assert_close(exchanged, torch.stack([e[own] for e in everyone]), rtol=0, atol=0)
    counts = [[(rank + other) % 3 for other in range(size)] for rank in range(size)]  # some have no rows for others
    incoming = [counts[rank][own] for rank in range(size)]
    rows, work = start_all_to_all_rows(x[:1].expand(sum(counts[own]), -1), counts[own], incoming, group)
    work.wait()
    expected = [everyone[rank][0] for rank in range(size) for _ in range(incoming[rank])]
    torch.testing.assert_close(rows, torch.stack(expected), rtol=0, atol=0)
    before, works = start_rotation(x, size, group)
    for each in works:
        each.wait()
    torch.testing.assert_close(before, everyone[own - 1], rtol=0, atol=0)
    host_peers.close_peers()
    return [gathered, summed, largest]


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_make_the_same_collectives(ranks: int, dtype: torch.dtype, in_memory: bool) -> None:
    results = run_on_mesh(_collectives, dtype, in_memory, tensor=ranks)
    for other in results[1:]:
        for value, first in zip(other, results[0], strict=True):
            torch.testing.assert_close(value, first, rtol=0, atol=0)
