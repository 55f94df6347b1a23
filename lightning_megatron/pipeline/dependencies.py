"""When can each instruction start? The one place that knows what a compute instruction waits for.

A forward waits for the forward of the previous virtual stage, a backward for the backward of the next one and for its
own forward, a weight backward for its input backward. Lowering, checking and simulating all ask the same question, so
they share this sweep: each rank runs its list in order, every instruction as early as its inputs allow.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_megatron.pipeline.instructions import Kind, Schedule

_ABSENT = -1.0


@dataclass(frozen=True)
class Durations:
    """Times of every compute instruction and every transfer, in any one unit.

    Args:
        forward: Time of a forward, per virtual stage.
        backward_input: Time of the input half of a backward, per virtual stage.
        backward_weight: Time of the weight half, per virtual stage; a whole backward takes both.
        latency: Time from the end of a transfer's last byte leaving to its arrival.
        transfer: Time that one transfer occupies its link (size / bandwidth).
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    latency: float = 0.0
    transfer: float = 0.0

    @classmethod
    def uniform(
        cls,
        virtual_stages: int,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        latency: float = 0.0,
        transfer: float = 0.0,
    ) -> Durations:
        """The same times on every virtual stage."""
        return cls(
            (forward,) * virtual_stages,
            (backward_input,) * virtual_stages,
            (backward_weight,) * virtual_stages,
            latency,
            transfer,
        )

    def of(self, kind: Kind, virtual_stage: int) -> float:
        """Time of one compute instruction."""
        if kind is Kind.FORWARD:
            return self.forward[virtual_stage]
        if kind is Kind.BACKWARD_INPUT:
            return self.backward_input[virtual_stage]
        if kind is Kind.BACKWARD_WEIGHT:
            return self.backward_weight[virtual_stage]
        return self.backward_input[virtual_stage] + self.backward_weight[virtual_stage]


@dataclass
class Sweep:
    """What :func:`sweep` found.

    Args:
        starts: Per rank, the start time of each instruction that could start.
        ends: Per rank, the end times.
        stuck: Rank to position in its list, for every rank that could not finish.
    """

    starts: list[list[float]]
    ends: list[list[float]]
    stuck: dict[int, int] = field(default_factory=dict)


def sweep(schedule: Schedule, durations: Durations) -> Sweep:
    """Run every rank's compute instructions as early as their inputs allow.

    Args:
        schedule: Compute instructions only (not lowered), each with chunk and micro-batch in range.
        durations: Times of instructions and transfers.

    Returns:
        Start and end times, and where ranks are stuck if the order can never finish.
    """
    return _Sweeper(schedule, durations).run()


class _Sweeper:
    """State of one sweep: finished times by virtual stage and micro-batch, and a clock per rank and link."""

    def __init__(self, schedule: Schedule, durations: Durations) -> None:
        self.schedule = schedule
        self.durations = durations
        pieces, count = schedule.virtual_stages, schedule.micro_batches
        # Arrival times at the consumer, so that a rank only compares numbers.
        self.activation = [[_ABSENT] * count for _ in range(pieces)]  # input of virtual stage, by micro-batch
        self.gradient = [[_ABSENT] * count for _ in range(pieces)]
        self.activation[0] = [0.0] * count
        self.gradient[-1] = [0.0] * count
        self.forward_done = [[_ABSENT] * count for _ in range(pieces)]
        self.input_done = [[_ABSENT] * count for _ in range(pieces)]
        self.position = [0] * schedule.stages
        self.clock = [0.0] * schedule.stages
        self.link_free: dict[tuple[int, int], float] = {}
        self.result = Sweep([[] for _ in range(schedule.stages)], [[] for _ in range(schedule.stages)])
        self.queue = list(range(schedule.stages - 1, -1, -1))
        self.queued = [True] * schedule.stages
        self.owner = [schedule.owner(piece)[0] for piece in range(pieces)]
        ranks, chunks = range(schedule.stages), range(schedule.chunks)
        self.pieces = [[schedule.virtual_stage(rank, chunk) for chunk in chunks] for rank in ranks]

    def run(self) -> Sweep:
        while self.queue:
            rank = self.queue.pop()
            self.queued[rank] = False
            self._advance(rank)
        lists = self.schedule.instructions
        self.result.stuck = {rank: at for rank, at in enumerate(self.position) if at < len(lists[rank])}
        return self.result

    def _advance(self, rank: int) -> None:
        steps, pieces = self.schedule.instructions[rank], self.pieces[rank]
        starts, ends = self.result.starts[rank], self.result.ends[rank]
        at, now = self.position[rank], self.clock[rank]
        while at < len(steps):
            step = steps[at]
            kind, piece, index = step.kind, pieces[step.chunk], step.micro_batch
            ready = self._ready(kind, piece, index)
            if ready < 0.0:
                break
            start = ready if ready > now else now
            now = start + self.durations.of(kind, piece)
            starts.append(start)
            ends.append(now)
            self._finish(kind, piece, index, rank, now)
            at += 1
        self.position[rank], self.clock[rank] = at, now

    def _ready(self, kind: Kind, piece: int, index: int) -> float:
        """Time at which the inputs are there, or a negative number when that is not known yet."""
        if kind is Kind.FORWARD:
            return self.activation[piece][index]
        if kind is Kind.BACKWARD_WEIGHT:
            return self.input_done[piece][index]
        if self.forward_done[piece][index] < 0.0:
            return _ABSENT
        return self.gradient[piece][index]

    def _finish(self, kind: Kind, piece: int, index: int, rank: int, now: float) -> None:
        if kind is Kind.FORWARD:
            self.forward_done[piece][index] = now
            if piece + 1 < len(self.owner):
                self._deliver(self.activation, piece + 1, index, rank, now)
        elif kind is not Kind.BACKWARD_WEIGHT:
            self.input_done[piece][index] = now
            if piece > 0:
                self._deliver(self.gradient, piece - 1, index, rank, now)

    def _deliver(self, table: list[list[float]], piece: int, index: int, rank: int, now: float) -> None:
        peer = self.owner[piece]
        if peer == rank:
            table[piece][index] = now
            return
        if self.durations.transfer:
            now = max(now, self.link_free.get((rank, peer), 0.0)) + self.durations.transfer
            self.link_free[(rank, peer)] = now
        table[piece][index] = now + self.durations.latency
        if not self.queued[peer]:
            self.queued[peer] = True
            self.queue.append(peer)
