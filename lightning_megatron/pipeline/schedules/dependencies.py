"""Computes when each instruction can start. The only file that defines what a computation waits for.

A forward waits for the forward of the previous virtual stage; a backward for the backward of the next one, or on the
last virtual stage for its own forward; a weight half for its input half. Lowering, checking and simulation share one
sweep: every rank runs its list in order, each instruction as early as its inputs allow.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_megatron.pipeline.schedules.instructions import Kind, Schedule

_ABSENT = -1.0


@dataclass(frozen=True)
class Costs:
    """Times of computations and transfers, all in the same unit of time.

    Args:
        forward: Time of a forward, per virtual stage.
        backward_input: Time of the input half of a backward, per virtual stage.
        backward_weight: Time of the weight half, per virtual stage.
        backward: Time of a backward that is not split; by default the sum of its halves.
        latency: Time between a message leaving its link and its arrival.
        message_size: Size of one boundary activation (and of its gradient), in any unit.
        bandwidth: Size per unit of time over one link; a link carries one message at a time in each direction.

    Raises:
        ValueError: The lengths differ, a cost is negative, or the bandwidth is not positive.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    backward: tuple[float, ...] | None = None
    latency: float = 0.0
    message_size: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        lengths = {len(self.forward), len(self.backward_input), len(self.backward_weight)}
        if len(lengths) > 1:
            raise ValueError(f"costs need one number per virtual stage each, got {sorted(lengths)} numbers")
        if self.bandwidth <= 0:
            raise ValueError(f"bandwidth={self.bandwidth} must be above 0")
        times = (*self.forward, *self.backward_input, *self.backward_weight, *(self.backward or ()))
        if min((*times, self.latency, self.message_size)) < 0:
            raise ValueError("costs must not be negative: a computation or transfer cannot take less than no time")

    @classmethod
    def uniform(
        cls,
        virtual_stages: int,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        *,
        backward: float | None = None,
        latency: float = 0.0,
        message_size: float = 0.0,
        bandwidth: float = math.inf,
    ) -> Costs:
        """The same times on every virtual stage; arguments as in the class."""
        return cls(
            (float(forward),) * virtual_stages,
            (float(backward_input),) * virtual_stages,
            (float(backward_weight),) * virtual_stages,
            None if backward is None else (float(backward),) * virtual_stages,
            latency,
            message_size,
            bandwidth,
        )

    @classmethod
    def slots(cls, virtual_stages: int) -> Costs:
        """One unit of time for every instruction, also for a whole backward: the time axis of textbook grids."""
        return cls.uniform(virtual_stages, backward=1.0)

    def of(self, kind: Kind) -> tuple[float, ...]:
        """Times of one kind of computation, per virtual stage."""
        if kind is Kind.FORWARD:
            return self.forward
        if kind is Kind.BACKWARD_INPUT:
            return self.backward_input
        if kind is Kind.BACKWARD_WEIGHT:
            return self.backward_weight
        return self.backward or tuple(map(sum, zip(self.backward_input, self.backward_weight, strict=True)))


@dataclass
class Sweep:
    """The result of :func:`sweep`.

    Args:
        starts: Per rank, the start time of each instruction that could start.
        ends: Per rank, the end times.
        stuck: For every rank that could not finish, the position in its list at which it waits.
    """

    starts: list[list[float]]
    ends: list[list[float]]
    stuck: dict[int, int]


def sweep(schedule: Schedule, costs: Costs) -> Sweep:
    """Run every rank's computations as early as their inputs allow, with asynchronous sends.

    Args:
        schedule: Computations only (not lowered), with chunks and micro-batches in range.
        costs: Times of computations and transfers.

    Returns:
        Start and end times, and where ranks are stuck if the order can never finish.
    """
    return _Sweeper(schedule, costs).run()


class _Sweeper:
    """State of one sweep. Arrays over (virtual stage, micro-batch) hold the time at which an input is ready."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        if len(costs.forward) != schedule.virtual_stages:
            raise ValueError(
                f"costs are for {len(costs.forward)} virtual stages, schedule {schedule.name!r} has"
                f" {schedule.virtual_stages} ({schedule.stages} stages x {schedule.chunks} chunks)"
            )
        self.lists = schedule.instructions
        self.count = schedule.micro_batches
        self.last = schedule.virtual_stages - 1
        self.costs = {kind: costs.of(kind) for kind in Kind if not kind.is_transfer}
        self.latency = costs.latency
        self.occupied = costs.message_size / costs.bandwidth
        size = schedule.virtual_stages * self.count
        self.activation = [0.0] * self.count + [_ABSENT] * (size - self.count)
        self.gradient = [_ABSENT] * size
        self.input_done = [_ABSENT] * size
        self.owner = [schedule.owner(piece)[0] for piece in range(schedule.virtual_stages)]
        ranks, chunks = range(schedule.stages), range(schedule.chunks)
        self.pieces = [[schedule.virtual_stage(rank, chunk) for chunk in chunks] for rank in ranks]
        self.position = [0] * schedule.stages
        self.link_free: dict[tuple[int, int], float] = {}
        self.starts: list[list[float]] = [[] for _ in ranks]
        self.ends: list[list[float]] = [[] for _ in ranks]
        self.queue = list(reversed(ranks))
        self.queued = [True] * schedule.stages

    def run(self) -> Sweep:
        while self.queue:
            rank = self.queue.pop()
            self.queued[rank] = False
            self._advance(rank)
        stuck = {rank: at for rank, at in enumerate(self.position) if at < len(self.lists[rank])}
        return Sweep(self.starts, self.ends, stuck)

    def _advance(self, rank: int) -> None:
        """Run ``rank`` until it waits for an input that is not ready."""
        forward, weight = Kind.FORWARD, Kind.BACKWARD_WEIGHT
        steps, pieces, starts, ends = self.lists[rank], self.pieces[rank], self.starts[rank], self.ends[rank]
        now = ends[-1] if ends else 0.0
        for at in range(self.position[rank], len(steps)):
            step = steps[at]
            kind, piece = step.kind, pieces[step.chunk]
            slot = piece * self.count + step.micro_batch
            # A gradient is ready only after this rank's own forward: on the last virtual stage the forward itself
            # provides it, and on the others it depends on that forward. So testing for the gradient is enough.
            inputs = self.activation if kind is forward else self.input_done if kind is weight else self.gradient
            ready = inputs[slot]
            if ready < 0.0:
                self.position[rank] = at
                return
            start = ready if ready > now else now
            now = start + self.costs[kind][piece]
            starts.append(start)
            ends.append(now)
            if kind is forward:
                self._forward_done(rank, piece, slot, now)
            elif kind is not weight:
                self.input_done[slot] = now
                if piece:
                    self._deliver(self.gradient, slot - self.count, rank, self.owner[piece - 1], now)
        self.position[rank] = len(steps)

    def _forward_done(self, rank: int, piece: int, slot: int, now: float) -> None:
        if piece == self.last:
            self.gradient[slot] = now
        else:
            self._deliver(self.activation, slot + self.count, rank, self.owner[piece + 1], now)

    def _deliver(self, table: list[float], slot: int, rank: int, peer: int, now: float) -> None:
        if peer == rank:
            table[slot] = now
            return
        if self.occupied:
            now = max(now, self.link_free.get((rank, peer), 0.0)) + self.occupied
            self.link_free[rank, peer] = now
        table[slot] = now + self.latency
        if not self.queued[peer]:
            self.queued[peer] = True
            self.queue.append(peer)


@contextmanager
def without_collector() -> Iterator[None]:
    """Pause the garbage collector while many small objects without reference cycles are created.

    It would scan all of them repeatedly, which takes half the time of lowering a schedule for thousands of ranks.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def consumers(schedule: Schedule, rank: int, kind: Kind) -> list[tuple[int, int] | None]:
    """Per chunk of ``rank``: the ``(rank, chunk)`` that needs the result of a computation of that kind.

    The result of a forward goes to the next virtual stage, and that of a backward or its input half to the previous
    one; no virtual stage waits for a weight half. ``None`` where there is no such virtual stage.
    """
    if kind is Kind.BACKWARD_WEIGHT:
        return [None] * schedule.chunks
    step = 1 if kind is Kind.FORWARD else -1
    targets = [schedule.virtual_stage(rank, chunk) + step for chunk in range(schedule.chunks)]
    return [schedule.owner(target) if 0 <= target < schedule.virtual_stages else None for target in targets]
