"""A ring's messages are under way while its ranks compute."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from lightning_megatron.context_parallel.rules import ring_attention
from lightning_megatron.context_parallel.rules.ring_attention import RingCall, ring
from lightning_megatron.context_parallel.token_split import TokenSplit, zigzag_runs
from lightning_megatron.mesh.autograd import in_backward
from tests.harness import run_ranks
from tests.harness.twins import tensor_group

RANKS = 2


class Noted:
    """Notes when a message starts, when it is waited for, and when blocks of keys are met."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.start, self.tiles = ring_attention.start_rotation, RingCall.tiles

    def started(self, *args: Any) -> Any:
        self.events.append("start")
        arrived, works = self.start(*args)
        return arrived, [mock.Mock(wait=lambda: self.waited(works))]

    def waited(self, works: Any) -> None:
        self.events.append("wait")
        for work in works:
            work.wait()

    def met(self, call: RingCall, *args: Any) -> Any:
        self.events.append("compute")
        return self.tiles(call, *args)


@run_ranks(tensor=RANKS)
def test_messages_of_a_ring_are_under_way_while_blocks_are_computed(mesh):
    noted = Noted()
    split = TokenSplit(tensor_group(mesh), 8, zigzag_runs(8, RANKS))
    rows = [torch.randn(1, 2, 4, 3, requires_grad=True) for _ in range(3)]
    with (
        mock.patch.object(ring_attention, "start_rotation", noted.started),
        mock.patch.object(RingCall, "tiles", lambda *call: noted.met(*call)),
    ):
        found = ring(split, *rows, None, is_causal=True)
        assert noted.events == ["start", "compute", "wait", "compute"]
        noted.events.clear()
        found.sum().backward()
    keys = ["start", "compute", "start", "wait"]  # the second: their gradients
    assert noted.events == [*keys, "compute", "wait", "start", "compute", "wait"]


class Clock:
    """Time of a rank that computes for as long as it is said to, and whose link sends one message after the other."""

    def __init__(self, link: float, block: float) -> None:
        self.link, self.block, self.now, self.link_is_free = link, block, 0.0, 0.0
        self.start, self.tiles = ring_attention.start_rotation, RingCall.tiles

    def started(self, x: Any, rows: int, group: Any) -> Any:
        self.link_is_free = there = max(self.now, self.link_is_free) + self.link
        arrived, works = self.start(x, rows, group)
        theirs, told = self.start(torch.tensor([there], dtype=torch.float64), 1, group)

        def wait() -> None:
            for work in (*works, *told):
                work.wait()
            self.now = max(self.now, there, float(theirs))

        return arrived, [mock.Mock(wait=wait)]

    def met(self, call: RingCall, mask: Any, owner: int, half: int | None = None) -> Any:
        self.now += self.block * (2 if in_backward() else 1) * (1.0 if half is None else 0.5)
        return self.tiles(call, mask, owner, half)


def makespan(group: Any, link: float, block: float) -> float:
    """Of forward and backward."""
    size, clock = group.size(), Clock(link, block)
    split = TokenSplit(group, 4 * size, zigzag_runs(4 * size, size))
    rows = [torch.randn(1, 2, 4, 3, requires_grad=True) for _ in range(3)]
    with (
        mock.patch.object(ring_attention, "start_rotation", clock.started),
        mock.patch.object(RingCall, "tiles", lambda *call: clock.met(*call)),
    ):
        ring(split, *rows, None, is_causal=True).sum().backward()
    return clock.now


def check_makespans(group: Any) -> None:
    """Messages cost nothing if none is longer than a block; else no more than two blocks are not hidden behind them."""
    size = group.size()
    for link, block in ((20, 40), (20, 20), (1, 40)):
        assert makespan(group, link, block) == 3 * size * block
    for link, block in ((40, 20), (40, 30), (40, 1)):
        assert makespan(group, link, block) <= max(3 * size * block, (3 * size - 2) * link) + 2 * block


@run_ranks(tensor=RANKS)
def test_a_ring_takes_as_long_as_its_blocks_or_its_messages(mesh):
    check_makespans(tensor_group(mesh))


@pytest.mark.wide
@run_ranks(tensor=4)
def test_a_ring_of_four_takes_as_long_as_its_blocks_or_its_messages(mesh):
    check_makespans(tensor_group(mesh))
