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
from lightning_megatron.pipeline.elsewhere.presence import Presence
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
        presence: says which parts of it are on this stage.
    """

    def __init__(self, module: nn.Module, presence: Presence) -> None:
        self._module, self._presence = module, presence

    def after(self, schedule: Schedule, deferred: frozenset[int]) -> Mapping[int, Final]:
        """See :class:`Finality`."""
        chunks = _chunks_of_parameters(self._module, self._presence, schedule)
        instructions = schedule.instructions[self._presence.stage]
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


def _chunks_of_parameters(module: nn.Module, presence: Presence, schedule: Schedule) -> dict[int, frozenset[int]]:
    """Chunks of this stage in which each parameter that it holds may be used."""
    everywhere = frozenset(range(schedule.chunks))
    names: dict[str, frozenset[int]] = {}
    for name, part in presence.parts.items():
        stage, chunk = (None, 0) if part.chunk is None else schedule.owner(part.chunk)
        names[name] = frozenset({chunk}) if stage == presence.stage else everywhere
    parts, chunks = Parts(names), dict[int, frozenset[int]]()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found = parts.of(name)
        used_in = everywhere if found is None else names[found]
        chunks[id(parameter)] = chunks.get(id(parameter), frozenset()) | used_in
    return chunks
