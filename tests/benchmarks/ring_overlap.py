"""Attention around a ring whose messages take their time, on ranks that sleep instead of computing.

``python -m tests.benchmarks.ring_overlap --ranks 4 --link 20 --block 40`` (milliseconds) runs forward and backward. A
rank sleeps for a step's blocks, twice as long in the backward, and a message takes as long as the link does, so two
busy cores show what GPUs would. Printed is the time against the larger of two sums: what a rank computes, and
what it sends one after another.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightning_megatron.context_parallel.rules import ring_attention
from lightning_megatron.context_parallel.rules.ring_attention import RingCall, ring
from lightning_megatron.context_parallel.token_split import TokenSplit, zigzag_runs
from lightning_megatron.mesh.autograd import in_backward
from tests.benchmarks.expert_overlap import SlowWork
from tests.harness import run_on_mesh


def attend(mesh: Any, link: float, block: float, rounds: int) -> list[float]:
    """Seconds of each round."""
    group = mesh["context_parallel"].get_group()
    size, start, tiles = group.size(), ring_attention.start_rotation, RingCall.tiles

    def slow(*args: Any) -> tuple[Tensor, list[Any]]:
        arrived, works = start(*args)
        return arrived, [SlowWork(work, link) for work in works]

    def sleeping(call: RingCall, mask: Tensor | None, owner: int, half: int | None = None) -> Iterator[Any]:
        time.sleep(block * (2 if in_backward() else 1) * (1.0 if half is None else 0.5))
        return tiles(call, mask, owner, half)

    split = TokenSplit(group, 4 * size, zigzag_runs(4 * size, size))
    found = []
    with (
        mock.patch.object(ring_attention, "start_rotation", slow),
        mock.patch.object(RingCall, "tiles", sleeping),
    ):
        for _ in range(rounds):
            rows = [torch.randn(1, 2, 4, 3, requires_grad=True) for _ in range(3)]
            torch.distributed.barrier(group)
            begin = time.perf_counter()
            ring(split, *rows, None, is_causal=True).sum().backward()
            torch.distributed.barrier(group)
            found.append(time.perf_counter() - begin)
    return found


def main() -> None:
    """Runs what was asked for, and prints a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, usual in (("ranks", 4), ("link", 20), ("block", 40), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = parser.parse_args()
    asked = given.link / 1e3, given.block / 1e3, given.rounds
    seconds = statistics.median(
        max(each) for each in zip(*run_on_mesh(attend, *asked, context=given.ranks), strict=True)
    )
    compute, messages = 3 * given.ranks * asked[1], (3 * given.ranks - 2) * asked[0]
    print(f"{'compute':10s} {compute * 1e3:8.1f} ms\n{'messages':10s} {messages * 1e3:8.1f} ms")
    print(f"{'makespan':10s} {seconds * 1e3:8.1f} ms, {seconds / max(compute, messages):.3f} of the larger")


if __name__ == "__main__":
    from tests.benchmarks import ring_overlap  # workers import what they run by name

    ring_overlap.main()
