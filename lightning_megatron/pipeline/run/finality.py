"""After which instruction of a step is the gradient of a parameter complete?

The sum over replicas of a bucket starts when its last gradient has arrived, so somebody must know which arrival is the
last. That depends on the schedule and on where the parameter is used: in the layers of one chunk, or of several; by a
linear whose weight gradient is put off until ``W``, or by something whose gradient is there after ``I``.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lightning_megatron.pipeline.cut.partition import Partition
from lightning_megatron.pipeline.schedules.instructions import Instruction, Kind, Schedule

_WHEN_NOT_PUT_OFF = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_WHEN_PUT_OFF = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def final_parameters(
    module: nn.Module, partition: Partition, schedule: Schedule, stage: int, put_off: frozenset[int]
) -> dict[int, frozenset[int]]:
    """Parameters whose gradients are complete after an instruction.

    Args:
        module: the module, cut.
        partition: who owns what.
        schedule: the schedule, with or without transfers.
        stage: this stage rank.
        put_off: ids of parameters whose gradients a split backward leaves to ``W``.

    Returns:
        Position in the stage's list -> ids of the parameters whose last gradient arrives there.
    """
    chunks = _chunks_of_parameters(module, partition, schedule, stage)
    instructions = schedule.instructions[stage]
    last = {
        (chunk, late): _last_position(instructions, chunk, _WHEN_PUT_OFF if late else _WHEN_NOT_PUT_OFF)
        for chunk in range(schedule.chunks)
        for late in (False, True)
    }
    found: dict[int, set[int]] = {}
    for parameter, used_in in chunks.items():
        position = max(last[chunk, parameter in put_off] for chunk in used_in)
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
    chunks: dict[int, frozenset[int]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        chunks[id(parameter)] = chunks.get(id(parameter), frozenset()) | _longest_match(name, names, everywhere)
    return chunks


def _longest_match(name: str, names: dict[str, frozenset[int]], otherwise: frozenset[int]) -> frozenset[int]:
    while name:
        if name in names:
            return names[name]
        name = name.rpartition(".")[0]
    return otherwise
