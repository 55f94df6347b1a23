"""A ring's messages are under way while its ranks compute."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from lightning_megatron.context_parallel.rules import ring_attention
from lightning_megatron.context_parallel.rules.ring_attention import RingCall, ring
from lightning_megatron.context_parallel.token_split import TokenSplit, zigzag_runs
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
