"""Boundary tensors between stages: whole, in parts over tensor ranks, and beside values that stay whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from lightning_megatron.pipeline.p2p import StageLinks
from tests.harness import run_ranks


def links_of(mesh: Any, scatter_from: int) -> tuple[StageLinks, int]:
    group = mesh["pipeline_parallel"].get_group()
    links = StageLinks(
        group, distributed.get_process_group_ranks(group), torch.device("cpu"), mesh["tensor_parallel"].get_group()
    )
    links.scatter_from = scatter_from
    return links, mesh["pipeline_parallel"].get_local_rank()


@run_ranks(tensor=2, pipeline=2)
def test_a_replicated_tensor_travels_in_parts_and_arrives_whole(mesh: Any) -> None:
    links, stage = links_of(mesh, scatter_from=1)
    hidden = torch.arange(2 * 3 * 4, dtype=torch.float64).view(2, 3, 4).transpose(0, 1)
    mask = torch.tensor([True, False, True])
    if stage == 0:
        links.send(1, [hidden, mask], tag=0, scatter=True)
        (sends,) = links._pending[1, 0]
        assert [data.numel() for _, data in sends] == [hidden.numel() // 2, mask.numel()]
    else:
        shapes = [(tuple(hidden.shape), hidden.dtype), (tuple(mask.shape), mask.dtype)]
        received = links.receive(0, shapes, tag=0, scatter=True).wait()
        assert torch.equal(received[0], hidden) and torch.equal(received[1], mask)
        received[0].requires_grad_()
    links.finish()


@run_ranks(tensor=2, pipeline=2)
def test_small_and_odd_tensors_and_those_of_unequal_ranks_travel_whole(mesh: Any) -> None:
    links, stage = links_of(mesh, scatter_from=100)
    own = float(mesh["tensor_parallel"].get_local_rank())
    cases = [(torch.full((50,), own), True), (torch.full((101,), own), True), (torch.full((400,), own), False)]
    for tag, (tensor, scatter) in enumerate(cases):
        odd_or_small = tensor[:13] if tag == 0 else tensor
        if stage == 0:
            links.send(1, [odd_or_small], tag=tag, scatter=scatter)
        else:
            shapes = [(tuple(odd_or_small.shape), odd_or_small.dtype)]
            (received,) = links.receive(0, shapes, tag=tag, scatter=scatter).wait()
            assert torch.equal(received, odd_or_small)
    links.finish()
