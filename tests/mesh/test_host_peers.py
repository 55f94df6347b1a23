"""Messages through memory that processes of one host share: of groups and threads, and more than a socket holds."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed

from lightning_megatron.mesh.messages import host_peers, transport
from lightning_megatron.mesh.messages.host_channel import PeerGone
from tests.harness import run_ranks

MANY = 3000


def others_of(mesh: Any) -> tuple[Any, int]:
    """The pipeline's group, with its peers connected, and the place of the other of two ranks."""
    host_peers.open_peers()
    group = mesh["pipeline_parallel"].get_group()
    return group, 1 - group.rank()


@run_ranks(pipeline=2)
def test_more_messages_may_be_under_way_than_a_socket_holds(mesh: Any) -> None:
    group, peer = others_of(mesh)
    expected = [transport.receive(group, torch.empty(3), peer) for _ in range(MANY)]
    distributed.barrier()
    for number in range(MANY):  # both ranks at once, and neither has read anything yet: each message needs a block
        transport.send(group, torch.full((3,), float(number)), peer)
    received = [message._tensor for message in expected]
    for message in reversed(expected):
        message.wait()
    assert [float(tensor[2]) for tensor in received if tensor is not None] == [float(n) for n in range(MANY)]
    distributed.barrier()
    host_peers.close_peers()


@run_ranks(pipeline=2)
def test_messages_of_groups_of_the_same_ranks_do_not_meet(mesh: Any) -> None:
    group, peer = others_of(mesh)
    further = distributed.new_group([0, 1])
    transport.send(further, torch.ones(2), peer)
    transport.send(group, torch.zeros(2), peer)
    one, other = torch.empty(2), torch.empty(2)
    transport.receive(group, one, peer).wait()
    transport.receive(further, other, peer).wait()
    assert one.tolist() == [0.0, 0.0] and other.tolist() == [1.0, 1.0]
    distributed.barrier()
    host_peers.close_peers()


@run_ranks(pipeline=2)
def test_memory_with_gaps_is_refused_on_both_sides(mesh: Any) -> None:
    group, peer = others_of(mesh)
    with pytest.raises(ValueError, match=r"3×3 float32 with strides \(1, 3\) is not contiguous"):
        transport.send(group, torch.ones(3, 3).t(), peer)
    with pytest.raises(ValueError, match=r"4 float32 with strides \(0,\) is not contiguous"):
        transport.receive(group, torch.ones(1).expand(4), peer)
    distributed.barrier()
    host_peers.close_peers()


@run_ranks(pipeline=2)
def test_blocks_that_several_threads_give_back_are_told_once_each(mesh: Any) -> None:
    group, peer = others_of(mesh)

    def exchange(tag: int) -> None:
        for number in range(200):
            transport.send(group, torch.full((3,), float(number + tag)), peer, tag)
            received = torch.empty(3)
            transport.receive(group, received, peer, tag).wait()
            assert received.tolist() == [number + tag] * 3
        done.append(tag)

    done: list[int] = []
    threads = [threading.Thread(target=exchange, args=(1000 * tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 4
    distributed.barrier()
    host_peers.close_peers()


@run_ranks(pipeline=2)
def test_two_threads_wait_for_their_own_messages(mesh: Any) -> None:
    group, peer = others_of(mesh)
    first, second = torch.empty(2), torch.empty(2)
    waits = [transport.receive(group, tensor, peer, tag) for tag, tensor in enumerate((first, second))]
    threads = [threading.Thread(target=wait.wait) for wait in waits]
    for thread in threads:
        thread.start()
    distributed.barrier()
    for tag in (1, 0):
        transport.send(group, torch.full((2,), float(tag)), peer, tag)
    for thread in threads:
        thread.join(20.0)
    assert first.tolist() == [0.0, 0.0] and second.tolist() == [1.0, 1.0]
    distributed.barrier()
    host_peers.close_peers()


@run_ranks(pipeline=2)
def test_long_messages_go_through_the_backend(mesh: Any) -> None:
    group, peer = others_of(mesh)
    sent: list[int] = []
    plain = transport._send
    with (
        mock.patch.object(host_peers, "_MOST_BYTES", 100),
        mock.patch.object(transport, "_send", lambda *given: sent.append(given[1].nbytes) or plain(*given)),
    ):
        for size in (25, 26):
            pending = transport.send(group, torch.zeros(size), peer)
            transport.receive(group, torch.empty(size), peer).wait()
            pending.wait()
    assert sent == [104]
    host_peers.close_peers()


@run_ranks(pipeline=2)
def test_who_waits_for_a_rank_that_has_ended_its_run_is_told(mesh: Any) -> None:
    group, peer = others_of(mesh)
    if group.rank() == 0:
        transport.send(group, torch.ones(2), peer)
        host_peers.close_peers()
    distributed.barrier()
    if group.rank() == 1:
        last = torch.empty(2)
        transport.receive(group, last, peer).wait()
        assert last.tolist() == [1.0, 1.0], "what was sent before arrives"
        with pytest.raises(PeerGone, match=r"rank 0 closed its connection"):
            transport.receive(group, last, peer).wait()
        with pytest.raises(PeerGone, match=r"rank 0 closed its connection"):
            transport.send(group, last, peer)
    host_peers.close_peers()


def test_channels_are_used_where_each_process_of_a_host_reaches_all_others() -> None:
    places = [(("a",), "1"), (("b",), "2"), (("a",), "3"), None, (("a",), "5")]
    assert host_peers._all_reach_all(places, [[], [], [0], [], [0, 2]])
    assert not host_peers._all_reach_all(places, [[], [], [0], [], [2]])
