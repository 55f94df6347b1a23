"""Draws what the memory of every rank is taken up by over one training step, beside what the planner expects."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_megatron.mesh.lazy import figure, save_figure
from lightning_megatron.strategy.memory.ledger import KINDS, MIB
from lightning_megatron.strategy.memory.live_bytes import LiveBytes
from lightning_megatron.strategy.memory.memory_report import MemoryReport, begin_measuring, end_measuring

_COLOURS = {
    "weights": "#3f6fb5",
    "optimizer": "#7d9fd3",
    "gradients": "#c98a3d",
    "activations": "#5d9f6f",
    "buffers": "#b9bec8",
}


class MemoryTimeline(Callback):
    """Measures one training step on all ranks, and draws its memory by kind.

    Prints the table of ``strategy.memory_report()``. Global rank 0 writes ``memory-step<n>.json`` and, with
    ``lightning_megatron[plots]``, ``memory-step<n>.svg``: over the time of the step, one above the other, weights,
    optimizer, gradients, activations and buffers of each rank, and beside them what the planner expects.

    Every tensor is counted from the operation that makes it until it is freed, on GPUs and CPUs alike. What an
    operation needs only while it runs is not seen; on GPUs the allocator's own peak is noted beside it. The step that
    is measured is slower, by about 10 µs per operation.

    Args:
        directory: where to; by default ``trainer.default_root_dir``.
        batch: which training batch of the run, from 1. In some of the first five losses are tried, over replicas on two
            batches at once, and state is made.

    Attributes:
        report: of the step, once it has run.

    Raises:
        ValueError: ``batch`` is below 1.
    """

    def __init__(self, directory: str | Path | None = None, batch: int = 6) -> None:
        if batch < 1:
            raise ValueError(f"`batch={batch}` must be at least 1.")
        self._directory, self._batch, self._seen = directory, batch, 0
        self._counter: LiveBytes | None = None
        self.report: MemoryReport | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse other strategies."""
        if not hasattr(trainer.strategy, "memory_report"):
            raise MisconfigurationException(
                "MemoryTimeline needs `Trainer(strategy=MegatronStrategy(...))`; this Trainer has "
                f"{type(trainer.strategy).__name__}."
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to count in the chosen batch."""
        self._seen += 1
        if self._seen == self._batch:
            self._counter = begin_measuring(trainer.strategy, batch)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Collect what was counted; every rank takes part."""
        if self._counter is None:
            return
        strategy: Any = trainer.strategy
        counter, self._counter = self._counter, None
        end_measuring(strategy, counter)
        self.report = strategy.memory_report()
        rank_zero_info(str(self.report))
        if trainer.is_global_zero:
            self._write(Path(self._directory or trainer.default_root_dir), self.report)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop counting."""
        if self._counter is not None:
            self._counter.end()
            self._counter = None

    def _write(self, directory: Path, report: MemoryReport) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"memory-step{self._batch}"
        path.with_suffix(".json").write_text(json.dumps([asdict(one) for one in report.ranks]))
        try:
            path.with_suffix(".svg").write_bytes(save_figure(draw(report), "svg"))
        except ImportError as error:
            rank_zero_info(str(error))


def draw(report: MemoryReport) -> Any:
    """A matplotlib figure: a row per rank, its step on the left, the planner's bar on the right where it has one.

    Raises:
        ImportError: matplotlib is not installed.
    """
    ranks = [one for one in report.ranks if one.step is not None]
    drawn = figure(8.0, 0.6 + 1.7 * len(ranks))
    axes = drawn.subplots(len(ranks), 2, squeeze=False, sharey="row", width_ratios=(12, 1))
    for (left, right), one in zip(axes, ranks, strict=True):
        step = one.step
        if step is None:
            continue
        times = [second * 1e3 for second in step.seconds]
        rows = [[value / MIB for value in step.kinds[kind]] for kind in _COLOURS]
        left.stackplot(times, rows, colors=list(_COLOURS.values()), labels=list(_COLOURS), step="post")
        left.set_ylabel(f"rank {one.rank}\nMiB")
        left.set_title(one.place, fontsize=8, loc="left")
        bottom = 0.0
        for kind, colour in _COLOURS.items() if one.predicted is not None else ():
            height = getattr(one.predicted, kind) / MIB
            right.bar(0, height, bottom=bottom, color=colour)
            bottom += height
        right.set_xticks([])
        right.set_xlabel("planner")
        right.set_visible(one.predicted is not None)
        for each in (left, right):
            each.spines[["top", "right"]].set_visible(False)
    if ranks:
        axes[0][0].legend(frameon=False, fontsize=8, ncols=len(KINDS), loc="lower left", bbox_to_anchor=(0.0, 1.12))
        axes[-1][0].set_xlabel("ms of the step")
    return drawn
