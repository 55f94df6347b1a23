"""After which instruction of a step is the gradient of a parameter complete?

The sum over replicas of a bucket starts as soon as its last gradient has arrived, so somebody must know which arrival
is the last. On a stage of a cut module that depends on the schedule and on where the parameter is used: in the layers
of one chunk or of several; by a linear whose weight gradient is deferred to ``W``, or by an operation whose gradient is
complete after ``I``. A module that is not cut has all its gradients after its last backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import nn

from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.pipeline.cut.partition import Partition
from lightning_megatron.pipeline.schedules.instructions import Instruction, Kind, Schedule

_AT_ONCE = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_DEFERRED = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)

Final = bool | frozenset[int]
"""Whether the gradients that arrive from now on are the last of the step: all, none, or those of parameters by id."""


class Finality(Protocol):
    """Knows where in a schedule gradients become final."""

    def after(self, schedule: Schedule, deferred: frozenset[int]) -> Mapping[int, Final]:
        """By position in this stage's list, which gradients the backward there completes.

        Args:
            schedule: with or without transfers.
            deferred: ids of parameters whose gradients a split backward leaves to ``W``.
        """


class WholeFinality:
    """Of a module that is not cut: everything is final in the last backward."""

    def after(self, schedule: Schedule, deferred: frozenset[int]) -> Mapping[int, Final]:
        """See :class:`Finality`."""
        return {_last_position(schedule.instructions[0], 0, _AT_ONCE): True}


class StageFinality:
    """Of one stage of a cut module.

    Args:
        module: the module, cut.
        partition: who owns what.
        stage: this stage rank.
    """

    def __init__(self, module: nn.Module, partition: Partition, stage: int) -> None:
        self._module, self._partition, self._stage = module, partition, stage

    def after(self, schedule: Schedule, deferred: frozenset[int]) -> Mapping[int, Final]:
        """See :class:`Finality`."""
        chunks = _chunks_of_parameters(self._module, self._partition, schedule, self._stage)
        instructions = schedule.instructions[self._stage]
        last = {
            (chunk, late): _last_position(instructions, chunk, _DEFERRED if late else _AT_ONCE)
            for chunk in range(schedule.chunks)
            for late in (False, True)
        }
        found: dict[int, set[int]] = {}
        for parameter, used_in in chunks.items():
            position = max(last[chunk, parameter in deferred] for chunk in used_in)
            found.setdefault(position, set()).add(parameter)
        return {position: frozenset(parameters) for position, parameters in found.items()}


def _last_position(instructions: Iterable[Instruction], chunk: int, kinds: tuple[Kind, ...]) -> int:
    return max((at for at, step in enumerate(instructions) if step.chunk == chunk and step.kind in kinds), default=-1)


def _chunks_of_parameters(
    module: nn.Module, partition: Partition, schedule: Schedule, stage: int
) -> dict[int, frozenset[int]]:
    """Chunks of this stage in which each parameter that it holds may be used."""
    everywhere = frozenset(range(schedule.chunks))
    names: dict[str, frozenset[int]] = {}
    for virtual, (start, stop) in enumerate(partition.bounds):
        rank, chunk = schedule.owner(virtual)
        if rank == stage:
            names |= {partition.trunk.layer_names[index]: frozenset({chunk}) for index in range(start, stop)}
    for unit in partition.units:
        names[unit] = everywhere
        for units, virtual in ((partition.before, 0), (partition.after, schedule.virtual_stages - 1)):
            rank, chunk = schedule.owner(virtual)
            if unit in units and rank == stage:
                names[unit] = frozenset({chunk})
    parts, chunks = Parts(names), dict[int, frozenset[int]]()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        part = parts.of(name)
        used_in = everywhere if part is None else names[part]
        chunks[id(parameter)] = chunks.get(id(parameter), frozenset()) | used_in
    return chunks
