"""Shows what a pipeline did in one training step, beside what the simulator says it should have done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_megatron.pipeline.pictures.drawing import chrome_trace, svg
from lightning_megatron.pipeline.run.clock import measured_costs
from lightning_megatron.pipeline.schedules.simulation import Timeline, simulate
from lightning_megatron.pipeline.schedules.text import counted


class PipelineTimeline(Callback):
    """Writes a picture and a trace of one step's computations on all stages.

    Needs ``MegatronStrategy(record_timeline=True)`` and at least two stages. Global rank 0 writes, for its own
    pipeline, ``timeline-step<n>.svg``; ``timeline-step<n>.json``, for https://ui.perfetto.dev or ``chrome://tracing``;
    and ``timeline-step<n>-predicted.svg``, the simulator's picture for the mean times that were measured and free
    messages. The difference is what messages, and uneven times, really cost.

    Args:
        directory: folder of the files; ``trainer.default_root_dir`` by default.
        batch: number of the training batch that is shown, from 1; the first ones are slower, as caches are cold.

    Attributes:
        measured: the step, once it has run.
        predicted: the simulator's.

    Raises:
        ValueError: ``batch`` is below 1.
    """

    def __init__(self, directory: str | Path | None = None, batch: int = 10) -> None:
        if batch < 1:
            raise ValueError(f"`batch={batch}` must be at least 1.")
        self._directory = directory
        self._batch = batch
        self._seen = 0
        self.measured: Timeline | None = None
        self.predicted: Timeline | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a strategy that records nothing."""
        strategy = trainer.strategy
        if not getattr(strategy, "records_timeline", False):
            raise MisconfigurationException(
                "PipelineTimeline needs `Trainer(strategy=MegatronStrategy(record_timeline=True, ...))`; this Trainer "
                f"has {type(strategy).__name__} without it."
            )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Collect the chosen step; every rank takes part."""
        self._seen += 1
        if self._seen != self._batch:
            return
        strategy: Any = trainer.strategy
        self.measured = strategy.measured_timeline()
        if self.measured is None:
            return
        self.predicted = simulate(self.measured.schedule, measured_costs(self.measured))
        rank_zero_info(self.summary())
        if trainer.is_global_zero:
            self._write(Path(self._directory or trainer.default_root_dir), self.measured, self.predicted)

    def summary(self) -> str:
        """The step in one line.

        Raises:
            RuntimeError: the chosen batch has not run yet.
        """
        if self.measured is None or self.predicted is None:
            raise RuntimeError(
                f"No step has been recorded yet: batch {self._batch} has not run (`PipelineTimeline(batch=)`)."
            )
        schedule = self.measured.schedule
        return (
            f"batch {self._batch}, {schedule.name}, {counted(schedule.stages, 'stage')}, "
            f"{counted(schedule.micro_batches, 'micro-batch')}: "
            f"{self.measured.makespan:.4g} s, bubble of the step {self.measured.step_bubble_fraction:.1%}; "
            f"predicted {self.predicted.makespan:.4g} s, {self.predicted.step_bubble_fraction:.1%}"
        )

    def _write(self, directory: Path, measured: Timeline, predicted: Timeline) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        name = f"timeline-step{self._batch}"
        (directory / f"{name}.svg").write_text(svg(measured, "s"))
        (directory / f"{name}-predicted.svg").write_text(svg(predicted, "s"))
        trace = chrome_trace(measured, microseconds=1e6)
        (directory / f"{name}.json").write_text(json.dumps(trace))
