"""One page about a run, and one screen when it starts: what runs where, how fast, and what it holds."""

from __future__ import annotations

import sys
import time
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_megatron.mesh.lazy import save_figure
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.replaced import Replacements
from lightning_megatron.pipeline.pictures.drawing import svg
from lightning_megatron.pipeline.run.clock import measured_costs
from lightning_megatron.pipeline.schedules.simulation import Timeline, simulate
from lightning_megatron.planner import ModelShape
from lightning_megatron.strategy.callbacks import report_page as html
from lightning_megatron.strategy.callbacks.run_facts import (
    RankFacts,
    ideal_bubble,
    layout_words,
    rank_facts,
    schedule_words,
    screen,
    size_words,
)
from lightning_megatron.strategy.callbacks.step_flops import FORWARD_AND_BACKWARD, StepFlops
from lightning_megatron.strategy.data.walk import batch_size_of
from lightning_megatron.strategy.planning import counted_shape, detected_cluster, sample_length

_WARM = 2  # steps that are not timed
_DRAWN = (3, 21)  # steps whose timeline is asked for; the later one stays, if the run comes to it: caches are warm
_COUNTED = (4, 5, 6, 19)  # steps whose operations are counted, of which the fewest stay: where a loss is tried are more


class RunReport(Callback):
    """Prints the run in one screen when training starts, and writes ``report.html`` and ``curves.png`` when it ends.

    The page holds everything itself: options, layout, losses, throughput and MFU, memory of every rank, the timeline of
    a step with its measured and its ideal bubble (with ``MegatronStrategy(record_timeline=True)``), and every warning
    once, with the ranks that were given it. Pictures of curves need ``lightning_megatron[plots]``.

    Operations are counted in the fifth step of the run, on every rank, and added up: the forwards' products,
    convolutions and attention with its whole score matrix, times three for forward and backward; nothing that is
    recomputed counts. MFU is that over the time of a step and the peak of all devices. It is too low with context
    parallelism, where only the part of the scores that is computed counts, and too high where tensor ranks share no
    heads and each computes all of the attention. What is compiled cannot be counted; give ``flops_per_step`` for it.

    Args:
        directory: where to; by default ``trainer.default_root_dir``.
        every: batches between two points of the curves.
        peak_tflops: of one device at the run's precision; known for NVIDIA's usual GPUs.
        flops_per_step: of the model, forward and backward, for the batch of all replicas; counted by default.

    Attributes:
        facts: what every rank knew when training ended, by rank.
        flops: of a step of the whole model; 0 as long as it is not known.
        seconds: of a step, the median of those that were timed; NaN before.
        path: of the page, on global rank 0, once it is written.

    Raises:
        ValueError: ``every`` is below 1.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        every: int = 1,
        peak_tflops: float | None = None,
        flops_per_step: float | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"`every={every}` must be at least 1.")
        self._directory = directory
        self._every = every
        self._peak_tflops = peak_tflops
        self.flops = flops_per_step or 0.0
        self._given = flops_per_step is not None
        self.facts: list[RankFacts] = []
        self.path: Path | None = None
        self._shape: ModelShape | str = "the module was not whole"
        self._mode: StepFlops | None = None
        self._counted = 0.0
        self._seen = 0
        self._last: float | None = None
        self._times: list[float] = []
        self._losses: dict[str, list[tuple[float, float]]] = {}
        self._speed: list[tuple[float, float]] = []
        self._samples = 0
        self._warned: dict[str, None] = {}
        self._replaced = Replacements()
        self._timeline: Timeline | None = None
        self._drawn = 0
        self._opening = ""

    @property
    def seconds(self) -> float:
        """Of a step: the median of those that were timed."""
        return float(torch.tensor(self._times).median()) if self._times else float("nan")

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Listen for warnings, and look at the module while it is whole."""
        if not hasattr(trainer.strategy, "mesh"):
            raise MisconfigurationException(
                f"RunReport needs `Trainer(strategy=MegatronStrategy(...))`; this Trainer has "
                f"{type(trainer.strategy).__name__}."
            )
        if stage != "fit":
            return
        show = warnings.showwarning

        def listen(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **more: Any) -> None:
            self._warned[str(message)] = None
            show(message, category, filename, lineno, *rest, **more)

        self._replaced.call(warnings, "showwarning", listen)
        try:
            self._shape = counted_shape(pl_module, 1)
        except (ValueError, RuntimeError) as error:
            self._shape = str(error).splitlines()[0]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the screen; every rank takes part."""
        ranks = objects.gather(rank_facts(trainer))
        self._opening = screen(trainer, ranks, self._shape)
        if trainer.is_global_zero:
            Tqdm.write(f"\n{self._opening}", file=sys.stderr)  # above a progress bar that is drawn already

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to count."""
        strategy: Any = trainer.strategy
        if self._seen + 1 in _COUNTED and not self._given and not strategy.options.compile_layers:
            self._mode = StepFlops(_shared(trainer))
            self._mode.__enter__()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """The products of an optimizer, as Muon's, are not the model's."""
        self._stop_counting()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the time, and a point of the curves; every rank takes part in some of the steps."""
        strategy: Any = trainer.strategy
        self._seen += 1
        if self._seen in _COUNTED and not self._given:
            self._stop_counting()
            counted = FORWARD_AND_BACKWARD * sum(objects.gather(self._counted))
            self.flops = min(self.flops or counted, counted)
        if self._seen in _DRAWN and strategy.records_timeline:
            self._timeline, self._drawn = strategy.measured_timeline(), self._seen
        self._take_time(trainer)
        if self._seen % self._every == 0 and trainer.is_global_zero:
            self._take_points(trainer, outputs)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The step before took no part of a validation's time."""
        self._last = None

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validation losses are points of curves, too."""
        if trainer.is_global_zero and not trainer.sanity_checking:
            self._take_points(trainer, None)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop listening and counting; nothing is written."""
        self._stop_counting()
        self._replaced.take_back()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather and write; every rank takes part."""
        self._replaced.take_back()
        self.facts = objects.gather(rank_facts(trainer, list(self._warned)))
        if trainer.is_global_zero:
            self._write(trainer, Path(self._directory or trainer.default_root_dir))

    def _stop_counting(self) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)
            self._counted = mode.forward

    def _take_time(self, trainer: pl.Trainer) -> None:
        device = trainer.strategy.root_device
        if device.type == "cuda" and self._seen % self._every == 0:
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        if self._last is not None and self._seen > _WARM + 1:
            self._times.append(now - self._last)
        self._last = now

    def _take_points(self, trainer: pl.Trainer, outputs: Any) -> None:
        step = trainer.global_step
        logged = {name: float(value) for name, value in trainer.callback_metrics.items() if "loss" in name}
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if not logged and isinstance(loss, torch.Tensor):
            logged = {"loss (replica 0)": float(loss)}
        for name, value in logged.items():
            points = self._losses.setdefault(name, [])
            if not points or points[-1][1] != value:
                points.append((step, value))
        if outputs is not None and self._times:
            latest = self._times[-min(len(self._times), max(10, self._every)) :]
            self._speed.append((step, self._per_step(trainer)[0] * len(latest) / sum(latest)))

    def _per_step(self, trainer: pl.Trainer) -> tuple[float, str]:
        """Size of a batch of the run, and its unit: tokens, where a sample is a row of them, else samples."""
        loader, strategy = trainer.train_dataloader, trainer.strategy
        replicas = strategy.distributed_sampler_kwargs["num_replicas"]  # type: ignore[attr-defined]
        batch = batch_size_of(loader)
        if batch is None:
            return 1.0, "batches"
        length = sample_length(loader)
        return float(batch * replicas * (length or 1)), "tokens" if length else "samples"

    def _peak(self, trainer: pl.Trainer) -> float | None:
        """FLOP/s of all devices, where it is known."""
        strategy: Any = trainer.strategy
        if self._peak_tflops is not None:
            return self._peak_tflops * 1e12 * trainer.world_size
        if strategy.root_device.type != "cuda":
            return None
        try:
            gpu = detected_cluster(strategy.root_device, trainer.num_devices).gpu
            return gpu.peak("bf16" if "16" in str(trainer.precision) else "fp32") * trainer.world_size
        except ValueError:
            return None

    def speed_rows(self, trainer: pl.Trainer) -> list[tuple[str, str]]:
        """Throughput in words, row by row."""
        amount, unit = self._per_step(trainer)
        if not self._times:
            return [("steps", f"{trainer.global_step}; too few to be timed")]
        rows = [
            ("steps", f"{trainer.global_step}"),
            ("time of a step", f"{self.seconds:.4g} s, the median of {len(self._times)}"),
            (f"{unit} per second", f"{amount / self.seconds:,.0f}"),
        ]
        if not self.flops:
            return [*rows, ("MFU", "not counted; give `RunReport(flops_per_step=...)`")]
        rate, peak = self.flops / self.seconds, self._peak(trainer)
        rows.append(("model FLOPs of a step", f"{self.flops:.4g}"))
        rows.append(("model FLOP/s of a device", f"{rate / trainer.world_size / 1e12:.4g} TFLOP/s"))
        unknown = "unknown: the peak of this device is not in the table; give `RunReport(peak_tflops=...)`"
        return [*rows, ("MFU", f"{rate / peak:.1%}" if peak else unknown)]

    def _write(self, trainer: pl.Trainer, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "report.html"
        strategy: Any = trainer.strategy
        unit = f"{self._per_step(trainer)[1]} per second"
        try:
            drawn = html.draw_curves(self._losses, self._speed, unit)
            (directory / "curves.png").write_bytes(save_figure(drawn, "png"))
            curves = html.picture(html.svg_of(drawn), curves=True)
        except ImportError as error:
            curves = html.text(str(error))
        batch = batch_size_of(trainer.train_dataloader)
        layout = [("grid", layout_words(strategy)), ("schedule", schedule_words(strategy, batch) or "no pipeline")]
        ranks = [
            (one.rank, one.place, one.holds, f"{one.parameters:,}", size_words(one.state), size_words(one.peak))
            for one in self.facts
        ]
        heads = ("rank", "place", "holds", "parameters", "weights, gradients, optimizer", "peak")
        last = [(name, f"{points[-1][1]:.4g}", points[-1][0]) for name, points in self._losses.items()]
        sections = [
            ("At the start", html.text(self._opening)),
            ("Layout", html.table(("", ""), layout)),
            ("Loss", html.table(("", "last", "step"), last) + curves),
            ("Throughput", html.table(("", ""), self.speed_rows(trainer))),
            ("Memory by rank", html.table(heads, ranks)),
            ("Timeline of a step", self._timeline_section()),
            ("Warnings", html.table(("said", "by ranks"), _said(self.facts)) or "<p>None.</p>"),
            ("Options", html.table(("argument", "value"), _options(strategy))),
            ("Hyperparameters", html.table(("name", "value"), list(trainer.lightning_module.hparams.items()))),
        ]
        self.path.write_text(html.page(f"Run report: {type(trainer.lightning_module).__name__}", sections), "utf-8")
        rank_zero_info(f"Report: {self.path}")

    def _timeline_section(self) -> str:
        if self._timeline is None:
            return "<p>Not recorded: it needs a pipeline and <code>MegatronStrategy(record_timeline=True)</code>.</p>"
        measured = self._timeline
        predicted = simulate(measured.schedule, measured_costs(measured))
        rows = [
            (f"measured in step {self._drawn}", f"{measured.step_bubble_fraction:.1%}", f"{measured.makespan:.4g} s"),
            ("with the mean times measured, messages free", f"{predicted.step_bubble_fraction:.1%}",
             f"{predicted.makespan:.4g} s"),
            ("ideal: stages that take equally long", f"{ideal_bubble(measured.schedule):.1%}", ""),
        ]  # fmt: skip
        return html.table(("", "bubble", "time"), rows) + html.picture(svg(measured, "s"))


def _shared(trainer: pl.Trainer) -> dict[int, int]:
    """Addresses of weights that all tensor ranks hold whole."""
    strategy: Any = trainer.strategy
    report, size = strategy.parallel_report, strategy.mesh.layout.tensor
    if report is None or size == 1:
        return {}
    whole = {name for name, sharding in report.parameters.items() if sharding.spec.is_whole}
    named = trainer.lightning_module.named_parameters(remove_duplicate=False)
    return {parameter.data_ptr(): size for name, parameter in named if name in whole and parameter.numel()}


def _said(facts: list[RankFacts]) -> list[tuple[str, str]]:
    """Every warning once, with the ranks that were given it."""
    ranks: dict[str, list[int]] = {}
    for one in facts:
        for text in one.warnings:
            ranks.setdefault(text, []).append(one.rank)
    return [(text, "all" if len(at) == len(facts) else ", ".join(map(str, at))) for text, at in ranks.items()]


def _options(strategy: Any) -> list[tuple[str, Any]]:
    """Arguments that are not left at their defaults."""
    options = strategy.options
    defaults = type(options)()
    pairs = [(field.name, getattr(options, field.name)) for field in fields(options)]
    return [(name, value) for name, value in pairs if value != getattr(defaults, name)]
