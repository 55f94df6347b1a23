"""Boundary tensors between stages: whole, in parts over tensor ranks, and beside values that stay whole; over gloo, and
through memory that processes of one host share.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed

from lightning_megatron.mesh.messages import host_peers, transport
from lightning_megatron.mesh.messages.host_channel import HostChannel, PeerGone
from lightning_megatron.mesh.messages.host_peers import open_channels
from lightning_megatron.pipeline.run.links import LinkOptions, StageLinks
from tests.harness import run_ranks


@contextmanager
def links_of(mesh: Any, **chosen: Any) -> Iterator[tuple[StageLinks, int]]:
    """The links of this rank, and its stage."""
    group, replicas = mesh["pipeline_parallel"].get_group(), mesh["tensor_parallel"].get_group()
    options, ranks = LinkOptions(**chosen), distributed.get_process_group_ranks(group)
    host_peers.open_peers()
    links = StageLinks(group, ranks, torch.device("cpu"), replicas, options)
    assert any(links._transport._ways) == options.through_memory
    yield links, mesh["pipeline_parallel"].get_local_rank()
    links.finish()
    host_peers.close_peers()


@pytest.mark.parametrize("through_memory", [True, False])
@run_ranks(tensor=2, pipeline=2)
def test_a_replicated_tensor_travels_in_parts_and_arrives_whole(mesh: Any, through_memory: bool) -> None:
    hidden = torch.arange(2 * 3 * 4, dtype=torch.float64).view(2, 3, 4).transpose(0, 1)
    mask = torch.tensor([True, False, True])
    sizes: list[int] = []
    send, hand_over = transport._send, HostChannel.send

    def counted_send(group: Any, data: Tensor, *where: int) -> Any:
        sizes.append(data.numel())
        return send(group, data, *where)

    def counted_hand_over(channel: HostChannel, data: Tensor, tag: int) -> Any:
        sizes.append(data.numel())
        return hand_over(channel, data, tag)

    with links_of(mesh, scatter_from=1, through_memory=through_memory) as (links, stage):
        if stage == 0:
            with (
                mock.patch.object(transport, "_send", counted_send),
                mock.patch.object(HostChannel, "send", counted_hand_over),
            ):
                links.send(1, [hidden, mask], tag=0, scatter=True)
            assert sizes == [hidden.numel() // 2, mask.numel()]
        else:
            shapes = [(tuple(hidden.shape), hidden.dtype), (tuple(mask.shape), mask.dtype)]
            received = links.receive(0, shapes, tag=0, scatter=True).wait()
            assert torch.equal(received[0], hidden) and torch.equal(received[1], mask)
            received[0].requires_grad_()


@pytest.mark.parametrize("through_memory", [True, False])
@run_ranks(tensor=2, pipeline=2)
def test_small_and_odd_tensors_and_those_of_unequal_ranks_travel_whole(mesh: Any, through_memory: bool) -> None:
    own = float(mesh["tensor_parallel"].get_local_rank())
    cases = [(torch.full((50,), own), True), (torch.full((101,), own), True), (torch.full((400,), own), False)]
    with links_of(mesh, scatter_from=100, through_memory=through_memory) as (links, stage):
        for tag, (tensor, scatter) in enumerate(cases):
            odd_or_small = tensor[:13] if tag == 0 else tensor
            if stage == 0:
                links.send(1, [odd_or_small], tag=tag, scatter=scatter)
            else:
                shapes = [(tuple(odd_or_small.shape), odd_or_small.dtype)]
                (received,) = links.receive(0, shapes, tag=tag, scatter=scatter).wait()
                assert torch.equal(received, odd_or_small)


@pytest.mark.parametrize("through_memory", [True, False])
@run_ranks(pipeline=2)
def test_messages_of_a_tag_go_to_its_receives_in_the_order_of_posting(mesh: Any, through_memory: bool) -> None:
    tags = [5, 3, 5, 3, 5]
    values = [torch.full((3, index + 1), float(index), dtype=torch.complex64) for index in range(len(tags))]
    with links_of(mesh, under_way=len(tags), through_memory=through_memory) as (links, stage):
        if stage == 0:
            for tag, value in zip(tags, values, strict=True):
                links.send(1, [value], tag)
                value.fill_(-1) if through_memory else None  # what is sent has been copied
        else:
            shapes = [[(tuple(value.shape), value.dtype)] for value in values]
            posted = [links.receive(0, shape, tag) for shape, tag in zip(shapes, tags, strict=True)]
            for index in (4, 1, 0, 3, 2):
                (received,) = posted[index].wait()
                assert torch.equal(received, values[index])


@run_ranks(pipeline=2)
def test_blocks_are_used_again_and_large_and_empty_messages_pass(mesh: Any) -> None:
    group = mesh["pipeline_parallel"].get_group()
    ((peer, channel),) = open_channels(group).items()
    assert peer == 1 - distributed.get_rank()
    for size in [0, 1, 3000, 1 << 20, 1 << 20, 5, 700_000, 0]:
        sent = channel.send(torch.arange(size), tag=1)
        received = torch.empty(size, dtype=torch.int64)
        channel.receive(received, tag=1).wait()
        assert torch.equal(received, torch.arange(size))
        sent.wait()
    assert len(channel._mine) == 3, "4 kB, 32 kB and 8 MB"
    channel.close()


@run_ranks(pipeline=2)
def test_a_message_of_another_size_is_refused(mesh: Any) -> None:
    ((_, channel),) = open_channels(mesh["pipeline_parallel"].get_group()).items()
    channel.send(torch.zeros(3), tag=1)
    with pytest.raises(RuntimeError, match=r"sent 12 bytes where 2 float32 \(8 bytes\) was expected"):
        channel.receive(torch.empty(2), tag=1).wait()
    distributed.barrier()
    channel.close()


@run_ranks(pipeline=2)
def test_a_process_that_is_gone_or_silent_is_named(mesh: Any) -> None:
    ((peer, channel),) = open_channels(mesh["pipeline_parallel"].get_group()).items()
    distributed.barrier()
    if mesh.get_rank() == 0:
        channel.close()
    else:
        with pytest.raises(PeerGone, match=f"rank {peer} closed its connection"):
            channel.receive(torch.empty(2), tag=1).wait()
        channel.close()
    silent = distributed.new_group(timeout=timedelta(seconds=1))
    ((peer, channel),) = open_channels(silent).items()
    with pytest.raises(PeerGone, match=f"rank {peer} sent nothing for 1 s"):
        channel.receive(torch.empty(2), tag=1).wait()
    distributed.barrier()
    channel.close()


def on_another_host() -> tuple[str, ...]:
    return "another", str(distributed.get_rank())


def without_proc() -> tuple[str, ...]:
    if distributed.get_rank() == 0:
        raise FileNotFoundError("/proc")
    return "one", "net"


@pytest.mark.parametrize("place", [on_another_host, without_proc])
@run_ranks(pipeline=2)
def test_processes_that_cannot_reach_each_other_go_through_the_backend(mesh: Any, place: Any) -> None:
    with mock.patch.object(host_peers, "_host", place):
        assert open_channels(mesh["pipeline_parallel"].get_group()) == {}
    with links_of(mesh, through_memory=False) as (links, stage):
        if stage == 0:
            links.send(1, [torch.ones(3)], tag=0)
        else:
            (received,) = links.receive(0, [((3,), torch.float32)], tag=0).wait()
            assert torch.equal(received, torch.ones(3))


def test_processes_of_other_users_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = host_peers._listen(1)
    assert listener is not None
    with listener, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(listener.getsockname())
        listener.settimeout(0.3)
        monkeypatch.setattr(host_peers.os, "getuid", lambda: -2)
        with pytest.raises(TimeoutError):
            host_peers._accept(listener, {1})
        assert stranger.recv(1) == b"", "closed"
