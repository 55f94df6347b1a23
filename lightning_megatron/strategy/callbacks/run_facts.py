"""Facts of each rank about a run, as plain data to be gathered; and the run in one screen of text."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_megatron.mesh.lazy import offered
from lightning_megatron.pipeline.schedules.simulation import simulate
from lightning_megatron.pipeline.schedules.text import counted
from lightning_megatron.planner import ModelShape, Recipe, predict
from lightning_megatron.strategy.data.walk import batch_size_of
from lightning_megatron.strategy.planning import detected_cluster, sample_length

MIB = 2**20


@dataclass(frozen=True)
class RankFacts:
    """Of one rank.

    Attributes:
        rank: its number.
        place: its coordinates, in words.
        stage: along the pipeline.
        holds: the layers, and the parts beside them.
        parameters: elements of them that are here.
        state: bytes of weights, gradients and optimizer state.
        moments: those of them that are optimizer state; none before the first step of a run that is not resumed.
        peak: bytes that the process, or its part of a GPU, has held at most.
        warnings: texts of the warnings that it was given.
    """

    rank: int
    place: str
    stage: int
    holds: str
    parameters: int
    state: int
    moments: int
    peak: int
    warnings: list[str] = field(default_factory=list)


def rank_facts(trainer: pl.Trainer, warned: Sequence[str] = ()) -> RankFacts:
    """Of this rank, now."""
    strategy: Any = trainer.strategy
    presence = list(trainer.lightning_module.parameters())
    here = [parameter for parameter in presence if is_here(parameter)]
    weights = sum(parameter.numel() * parameter.element_size() for parameter in here)
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in here if parameter.requires_grad)
    kept = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    moments = sum(
        value.numel() * value.element_size()
        for state in kept
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    return RankFacts(
        rank=trainer.global_rank,
        place=str(strategy.mesh.coordinates),
        stage=strategy.mesh.coordinates.pipeline,
        holds=held(strategy),
        parameters=sum(parameter.numel() for parameter in here),
        state=weights + gradients + moments,
        moments=moments,
        peak=peak_bytes(strategy.root_device),
        warnings=list(warned),
    )


def is_here(parameter: torch.Tensor) -> bool:
    """Whether a rank holds a parameter; stand-ins of other stages' are zeros expanded from one element."""
    if parameter.device.type == "meta" or parameter.numel() == 0:
        return False
    return parameter.untyped_storage().nbytes() >= parameter.numel() * parameter.element_size()


def held(strategy: Any) -> str:
    """Layers and other parts of this rank's stage, in words."""
    partition = strategy.partition
    if partition is None:
        return "the whole module"
    stage = strategy.mesh.coordinates.pipeline
    runs = [bounds for bounds, owner in zip(partition.bounds, partition.owners, strict=True) if owner == stage]
    layers = ", ".join(str(start) if stop == start + 1 else f"{start}–{stop - 1}" for start, stop in runs)
    others = [name for name, owners in partition.units.items() if stage in owners]
    return "; ".join([f"{partition.trunk.name} {layers}", *([", ".join(others)] if others else [])])


def peak_bytes(device: torch.device) -> int:
    """The most that was held so far: on a GPU by torch, elsewhere by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def size_words(size: int) -> str:
    """Bytes, as ``6.7 MiB``."""
    return f"{size / MIB:,.1f} MiB" if size >= MIB / 10 else f"{size / 1024:,.1f} KiB"


def layout_words(strategy: Any) -> str:
    """The grid in words, as ``pipeline 2 × data 2``."""
    layout = strategy.mesh.layout
    sizes = {name: getattr(layout, name) for name in ("pipeline", "data", "context", "tensor")}
    words = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return f"{layout.world_size} ranks = {words}" if words else "1 rank"


def schedule_words(strategy: Any, batch: int | None) -> str:
    """Schedule, micro-batches and the bubble that equal stages would have; empty without a pipeline."""
    schedules = strategy.run.engine.schedules
    options = strategy.options
    if strategy.mesh.layout.pipeline == 1:
        return ""
    size = options.micro_batch_size
    found = list(schedules.values())[-1] if schedules else None
    if isinstance(size, int) and batch:  # schedules of trials are among them
        found = next((one for one in schedules.values() if one.micro_batches == -(-batch // size)), None)
    if found is not None:
        batches = counted(found.micro_batches, "micro-batch")
        return f"{found.name}, {batches}, bubble of equal stages {ideal_bubble(found):.0%}"
    if not isinstance(size, int) or not batch:
        return str(options.pipeline_schedule)
    return f"{options.pipeline_schedule}, {-(-batch // size)} micro-batches of {size}"


def ideal_bubble(schedule: Any) -> float:
    """Idle share of a step whose stages all take equally long."""
    return simulate(schedule).step_bubble_fraction


def expected_step(trainer: pl.Trainer, shape: ModelShape | str) -> str:
    """The planner's time of a step in words, or why there is none."""
    if isinstance(shape, str):
        return f"not predicted: {shape.partition(';')[0]}"
    strategy: Any = trainer.strategy
    layout, loader = strategy.mesh.layout, trainer.train_dataloader
    batch, seq = batch_size_of(loader), sample_length(loader)
    if batch is None or seq is None:
        return "not predicted: the sizes of a batch cannot be read from the loader"
    size = strategy.options.micro_batch_size
    size = size if isinstance(size, int) and batch % size == 0 else batch
    try:
        cluster = detected_cluster(strategy.root_device, trainer.num_devices)
        recipe = Recipe(
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            data=layout.data,
            micro_batch=size,
            global_batch=batch * layout.data,
            precision="bf16" if "bf16" in str(trainer.precision) else "fp32",
        )
        seconds = predict(replace(shape, seq=seq), recipe, cluster).iteration_seconds
    except ValueError as error:
        return f"not predicted: {error}"
    rough = "" if strategy.root_device.type == "cuda" else ", a rough guess on CPU processes"
    return f"{seconds:.3g} s expected by the planner{rough}"


def screen(trainer: pl.Trainer, ranks: Sequence[RankFacts], shape: ModelShape | str) -> str:
    """The run in one screen: grid, split, plan, memory, expected time."""
    strategy: Any = trainer.strategy
    where = f"{layout_words(strategy)}, {strategy.root_device.type}, {trainer.precision}"
    lines = [f"lightning_megatron {offered('__version__')}: {where}"]
    schedule = schedule_words(strategy, batch_size_of(trainer.train_dataloader))
    lines += [f"  schedule  {schedule}"] if schedule else []
    for stage in sorted({one.stage for one in ranks}):
        at = [one for one in ranks if one.stage == stage]
        names = " ".join(str(one.rank) for one in at[:4]) + (" …" if len(at) > 4 else "")
        several, each = ("s", " each") if len(at) > 1 else ("", "")
        lines.append(f"  stage {stage}   rank{several} {names}: {at[0].holds} ({at[0].parameters:,} parameters{each})")
    report = strategy.parallel_report
    if report is not None:
        lines.append(f"  tensor    {report.explain().splitlines()[0]}; `trainer.strategy.explain()` lists it")
    fullest = max(ranks, key=lambda one: one.state)
    what, later = "weights, gradients and optimizer", ""
    if not fullest.moments:
        what, later = "weights and gradients", "; the optimizer's state comes with the first step"
    lines.append(f"  memory    {size_words(fullest.state)} of {what} on rank {fullest.rank}, the fullest{later}")
    lines.append(f"  step      {expected_step(trainer, shape)}")
    return "\n".join(lines)
