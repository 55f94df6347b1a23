"""The memory of every rank: what it holds, what a step needed at its fullest moment, and what the planner expects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_megatron.mesh.marks import Marks
from lightning_megatron.mesh.messages import objects
from lightning_megatron.strategy.lightning.trainer_access import present, trainer_of
from lightning_megatron.strategy.memory.ledger import KINDS, MIB, Bytes, gradients_of, held, lasting
from lightning_megatron.strategy.memory.live_bytes import LiveBytes, StepBytes

_POINTS = 400


@dataclass(frozen=True)
class RankMemory:
    """Of one rank.

    Attributes:
        rank: its number.
        place: its coordinates, in words.
        held: bytes that it keeps now, between steps.
        predicted: by the planner, at the fullest moment of a step; ``None`` where it knows no such model.
        step: of the latest step that was measured, over its time; ``None`` before one was.
        freeing: when weights that replicas share are freed and why, once the run has chosen that itself.
    """

    rank: int
    place: str
    held: Bytes
    predicted: Bytes | None
    step: StepBytes | None
    freeing: str = ""

    @property
    def peak(self) -> Bytes | None:
        """Bytes by kind at the fullest moment of the step that was measured."""
        return None if self.step is None else self.step.peak


@dataclass(frozen=True)
class MemoryReport:
    """Of all ranks, in order.

    Attributes:
        ranks: one by one.
        not_predicted: why the planner expects nothing; empty where it does.
    """

    ranks: Sequence[RankMemory]
    not_predicted: str = ""

    def __str__(self) -> str:
        """A table in MiB: measured at the fullest moment of a step, or between steps; the planner's in brackets."""
        measured = all(one.peak is not None for one in self.ranks)
        when = (
            "at the fullest moment of a step" if measured else "between steps (`callbacks.MemoryTimeline` measures one)"
        )
        heads = ["rank", *KINDS, "total", *(["host"] if any(one.held.host for one in self.ranks) else [])]
        rows = [heads, *([str(one.rank), *_cells(one, heads[1:])] for one in self.ranks)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        said = f"not predicted: {self.not_predicted}" if self.not_predicted else "in brackets what the planner expects"
        chosen = [f"rank {one.rank}: `weight_sharding` has {one.freeing}" for one in self.ranks if one.freeing]
        return "\n".join([f"Memory in MiB, {when}; {said}", *lines, *chosen])


def _cells(one: RankMemory, kinds: Sequence[str]) -> list[str]:
    found, cells = one.peak or one.held, []
    for kind in kinds:
        value = f"{getattr(found, kind) / MIB:,.2f}"
        cells.append(value if one.predicted is None else f"{value} ({getattr(one.predicted, kind) / MIB:,.2f})")
    return cells


def memory_report(strategy: Any) -> MemoryReport:
    """The memory of every rank, by kind: measured, and beside it what the planner expects. Collective over all ranks.

    Before :class:`~lightning_megatron.callbacks.MemoryTimeline` has measured a step, what ranks keep between steps.

    Raises:
        RuntimeError: before the first run.
    """
    from lightning_megatron.strategy.memory.expected import expected  # imports the planner

    run = strategy.run
    trainer = present(trainer_of(run.module), "Trainer")
    found = expected(trainer, run.module)
    place = strategy.mesh.coordinates
    gradients = run.engine.model_gradients
    here = held(run.module, gradients, trainer.optimizers, strategy.root_device)
    step = Marks.of(run.module).get(StepBytes)
    freeing = None if gradients.windows is None else gradients.windows.freeing
    chosen = "" if freeing is None else freeing.chosen
    if freeing is not None and chosen and not isinstance(found, str):
        found = replace(found, recipe=replace(found.recipe, free="step" if freeing.keeps else "layer"))
    predicted = None if isinstance(found, str) else found.bytes_of(place.pipeline)
    ranks = objects.gather(RankMemory(strategy.mesh.rank, str(place), here, predicted, step, chosen))
    return MemoryReport(ranks, found if isinstance(found, str) else "")


def begin_measuring(strategy: Any, batch: Any) -> LiveBytes:
    """Start to count the bytes of this rank's step."""
    run = strategy.run
    trainer, module, gradients = present(trainer_of(run.module), "Trainer"), run.module, run.engine.model_gradients
    parameters = list(module.parameters())  # asked for here, as a step is watched for what it asks
    counter = LiveBytes(
        strategy.root_device,
        lambda: lasting(module, gradients, trainer.optimizers),
        lambda: gradients_of(parameters, gradients),
    )
    counter.begin(batch)
    return counter


def end_measuring(strategy: Any, counter: LiveBytes) -> None:
    """Stop, and keep what was found for :func:`memory_report`."""
    Marks.of(strategy.run.module).put(counter.end().thinned(_POINTS))
