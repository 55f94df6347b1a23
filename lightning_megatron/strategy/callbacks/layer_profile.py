"""Measures the layers of a pipeline in its first steps, and says how far from even the stages are.

A callback that the strategy itself adds for ``pipeline_split="profile"``, which is why it does not import it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain
from operator import sub
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_megatron.mesh.messages import objects
from lightning_megatron.pipeline.cut.balance import balance, run_loads, stage_loads
from lightning_megatron.pipeline.forwards.stack import ForwardSlot, ForwardStack, Wrapper
from lightning_megatron.pipeline.run.clock import measured_costs
from lightning_megatron.pipeline.stage.stage import Stage, called_modules
from lightning_megatron.strategy.lightning.trainer_access import callbacks_of


class PipelineProfile(Callback):
    """Times each layer's forward and each stage's computations, and proposes a ``pipeline_split``.

    ``pipeline_split="auto"`` counts floating-point operations; real layers also wait for memory, and real heads for a
    softmax. After ``batches`` training batches, rank 0 prints the time of every stage, the imbalance (slowest stage
    over the mean), and the split that would be most even by the measured times. A stage's time beyond its layers' is
    taken to be what runs before the first layer or after the last.

    ``MegatronStrategy(pipeline_split="profile")`` cuts as ``"auto"`` does and adds this callback; to measure a split of
    your own, add it yourself, with ``record_timeline=True``.

    Args:
        batches: training batches to measure, after two that are not.

    Attributes:
        report: what was printed, once it was.
        imbalance: slowest stage over the mean; 1 is even.
        split: layers per virtual stage that would be most even; the present ones where nothing is gained.

    Raises:
        ValueError: ``batches`` is below 1.
    """

    def __init__(self, batches: int = 5) -> None:
        if batches < 1:
            raise ValueError(f"`batches={batches}` must be at least 1.")
        self._batches = batches
        self._seen = 0
        self._timers: dict[str, list[_LayerTimer]] = {}
        self._stages: list[list[float]] = []
        self.report = ""
        self.imbalance = float("nan")
        self.split: list[int] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a strategy that records nothing, and a second profile."""
        strategy = trainer.strategy
        if not getattr(strategy, "records_timeline", False):
            raise MisconfigurationException(
                "PipelineProfile needs `Trainer(strategy=MegatronStrategy(record_timeline=True, ...))`; this Trainer "
                f"has {type(strategy).__name__} without it."
            )
        count = sum(isinstance(callback, PipelineProfile) for callback in callbacks_of(trainer))
        if count > 1:
            raise MisconfigurationException(
                f"This Trainer has {count} PipelineProfile callbacks, which would time each other; leave one of them "
                "in `callbacks=[...]`."
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start watching after the batches that warm up."""
        self._seen += 1
        stage = Stage.of(pl_module) if self._seen == 3 else None
        if stage is not None:
            self._timers = {
                name: [_LayerTimer(called) for _, called in called_modules(pl_module.get_submodule(name), name)]
                for name in stage.presence.layers_here()
            }
            for timer in chain.from_iterable(self._timers.values()):
                timer.install()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Collect one more step; after the last, report. Every rank takes part."""
        strategy: Any = trainer.strategy
        if not 3 <= self._seen < 3 + self._batches:
            return
        timeline = strategy.measured_timeline()
        if timeline is None:
            return
        self._stages.append(list(measured_costs(timeline).forward))
        if self._seen == 2 + self._batches:
            self._finish(strategy)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop watching, where the run was too short to report."""
        self._times()

    def _times(self) -> dict[str, float]:
        """Stop watching; mean seconds of a forward of each layer here."""
        times = {name: sum(timer.finish() for timer in timers) for name, timers in self._timers.items()}
        self._timers = {}
        return times

    def _finish(self, strategy: Any) -> None:
        partition = strategy.partition
        own = self._times()
        everyone = objects.gather(own, strategy.mesh.group("pipeline_parallel"))
        times = {name: seconds for rank in everyone for name, seconds in rank.items()}
        layers = [times[name] for name in partition.trunk.layer_names]
        stages = [sum(column) / len(column) for column in zip(*self._stages, strict=True)]
        present = [stop - start for start, stop in partition.bounds]
        extra = [max(0.0, at) for at in map(sub, stages, run_loads(present, layers, 0.0, 0.0))]
        own = sum(extra[1:-1]) / max(1, len(extra) - 2)  # what running the step costs on any stage
        ends = [max(0.0, extra[at] - own) for at in (0, -1)]
        owners = partition.owners
        self.imbalance = _unevenness(stages, owners)
        split = balance(layers, owners, *ends)
        loads = [load + own for load in run_loads(split, layers, *ends)]
        better = max(stage_loads(loads, owners)) < 0.98 * max(stage_loads(stages, owners))
        self.split = split if better else present
        self.report = _describe(layers, stages, ends, owners)
        if better:
            self.report += (
                f" `pipeline_split={split}` instead of {present} would make that {_unevenness(loads, owners):.2f}."
            )
        else:
            self.report += f" `pipeline_split={present}`, as it is, is the most even split by these times."
        rank_zero_info(self.report)


def _unevenness(loads: Sequence[float], owners: Sequence[int]) -> float:
    """Slowest stage over the mean."""
    sums = stage_loads(loads, owners)
    return max(sums) * len(sums) / sum(sums)


def _describe(layers: Sequence[float], runs: Sequence[float], ends: Sequence[float], owners: Sequence[int]) -> str:
    stages = stage_loads(runs, owners)
    pieces = "" if len(stages) == len(runs) else f" (by piece: {_milliseconds(runs)})"
    return (
        f"forward of a micro-batch, by stage: {_milliseconds(stages)}{pieces}; layers take {_milliseconds(layers)}, "
        f"what runs before them {_milliseconds(ends[:1])} and after them {_milliseconds(ends[1:])}. The slowest stage "
        f"takes {_unevenness(runs, owners):.2f} times the mean."
    )


def insert_profile(trainer: pl.Trainer) -> None:
    """Add a :class:`PipelineProfile`, once."""
    callbacks = callbacks_of(trainer)
    if not any(isinstance(callback, PipelineProfile) for callback in callbacks):
        callbacks.append(PipelineProfile())


class _LayerTimer(Wrapper):
    """Times the forwards of a layer, or of one module in a layer that is a container, in training; skipped calls and
    recomputation do not count.
    """

    slot = ForwardSlot.PROFILE

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._seconds = 0.0
        self._runs = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        _wait_for_device()
        begin = time.perf_counter()
        output = self.forward(*args, **kwargs)
        _wait_for_device()
        self._seconds += time.perf_counter() - begin
        self._runs += 1
        return output

    def finish(self) -> float:
        """Stop; mean time of a forward in seconds."""
        ForwardStack.of(self.module).remove(self.slot)
        return self._seconds / max(1, self._runs)


def _wait_for_device() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _milliseconds(seconds: Sequence[float]) -> str:
    return ", ".join(f"{1e3 * value:.3g}" for value in seconds) + " ms"
