"""Scores predictions against the measured values of published runs, in each run's own FLOPs convention."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_megatron.planner.cost.prediction import Prediction
from lightning_megatron.planner.runs.runs import PublishedRun


def convention_flops(run: PublishedRun, prediction: Prediction) -> float:
    """FLOPs of one step in the run's own convention.

    * ``hardware x4 (old estimate ...)``: 96 B s l h^2, the layers' matrix products with full recomputation only;
    * ``... full recompute`` and ``x4``: 96 B s l h^2 (1 + s/(6h) + V/(16lh)), equation 3 of arXiv 2104.04473;
    * other ``hardware``: model FLOPs plus recomputed FLOPs;
    * otherwise: model FLOPs, with the full score matrix of attention.
    """
    shape, tokens = run.shape, run.recipe.global_batch * run.shape.seq
    text = run.convention.lower()
    head = 6.0 * shape.vocab * shape.hidden
    if "old estimate" in text:
        return 8.0 * tokens * shape.layers * shape.layer_matrix_parameters
    if "full recompute" in text or "x4" in text or "eq.3" in text:
        return tokens * (4.0 * shape.layer_flops_per_token + head)
    if text.startswith("hardware"):
        return prediction.hardware_tflops / prediction.model_tflops * shape.model_flops_per_token * tokens
    return tokens * shape.model_flops_per_token


def convention_tflops(run: PublishedRun, prediction: Prediction) -> float:
    """Predicted TFLOP/s per GPU in the run's own convention."""
    return convention_flops(run, prediction) / prediction.iteration_seconds / run.recipe.world / 1e12


def measured_number(row: Mapping[str, str], column: str) -> float | None:
    """Number in a measured cell; None if it is empty or not a positive number (``OOM``)."""
    try:
        value = float(row.get(column) or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def measured_seconds(row: Mapping[str, str], run: PublishedRun, prediction: Prediction) -> float | None:
    """Measured seconds per step, or computed from tokens/s, TFLOP/s (the row's convention) or MFU; None without any."""
    world, tokens = run.recipe.world, run.recipe.global_batch * run.shape.seq
    if seconds := measured_number(row, "iter_s"):
        return seconds
    if rate := measured_number(row, "tok_s_gpu"):
        return tokens / rate / world
    if rate := measured_number(row, "tflops_gpu_reported"):
        return convention_flops(run, prediction) / world / rate / 1e12
    mfu = measured_number(row, "mfu_std") or measured_number(row, "mfu_reported")
    if mfu is None:
        return None
    return run.shape.model_flops_per_token * tokens / world / (mfu * run.cluster.gpu.peak(run.recipe.precision))


def ran_out_of_memory(row: Mapping[str, str]) -> bool:
    """Whether a row reports an out-of-memory failure instead of a time."""
    marks = [row.get(column, "").strip().lower() for column in ("mem_gb", "iter_s", "iter_s_kind", "tok_s_gpu")]
    if any(mark in ("oom", "out of memory") for mark in marks):
        return True
    notes = row.get("notes", "").lower()
    return "oom" in notes and "close to oom" not in notes and measured_number(row, "iter_s") is None


@dataclass(frozen=True, slots=True)
class Scored:
    """A prediction and its measurement.

    Attributes:
        run: the run.
        prediction: of the run.
        seconds: measured seconds per step, or None.
        oom: whether the run ran out of memory.
    """

    run: PublishedRun
    prediction: Prediction
    seconds: float | None
    oom: bool

    @property
    def error(self) -> float | None:
        """Signed relative error of the predicted step time; None without a measurement."""
        if self.seconds is None:
            return None
        return self.prediction.iteration_seconds / self.seconds - 1.0


def score_row(row: Mapping[str, str], run: PublishedRun, prediction: Prediction) -> Scored:
    """Compare a prediction with the measured columns of its row."""
    return Scored(run, prediction, measured_seconds(row, run, prediction), ran_out_of_memory(row))


def kendall(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Kendall's tau-b of two sequences of one length; None if it is undefined."""
    concordant = discordant = ties_left = ties_right = 0
    for i in range(len(left)):
        for j in range(i):
            a, b = left[i] - left[j], right[i] - right[j]
            if a == 0 and b == 0:
                continue
            if a == 0:
                ties_left += 1
            elif b == 0:
                ties_right += 1
            elif a * b > 0:
                concordant += 1
            else:
                discordant += 1
    pairs = concordant + discordant
    scale = math.sqrt((pairs + ties_left) * (pairs + ties_right))
    return (concordant - discordant) / scale if scale else None


@dataclass(frozen=True, slots=True)
class FamilyScore:
    """Errors of one family, or of all rows.

    Attributes:
        family: name, or ``all``.
        rows: number of rows.
        median_error: median absolute error of the step time in percent; None without measured times.
        bias: median signed error in percent; None without measured times.
        correlation: Kendall's tau-b of predicted and measured times, for ``all`` the mean over families, or None.
        fitting_right: number of rows for which it was predicted correctly whether they fit in memory.
        fitting_rows: number of rows for which that was predicted.
    """

    family: str
    rows: int
    median_error: float | None
    bias: float | None
    correlation: float | None
    fitting_right: int
    fitting_rows: int


def summarize(family: str, scored: Iterable[Scored]) -> FamilyScore:
    """Score a family: errors and rank correlation of step times, and predictions of whether a run fits in memory."""
    items = list(scored)
    timed = [item for item in items if item.error is not None]
    errors = [item.error for item in timed if item.error is not None]
    tau = kendall([item.prediction.iteration_seconds for item in timed], [item.seconds or 0.0 for item in timed])
    return FamilyScore(
        family=family,
        rows=len(items),
        median_error=100 * statistics.median(abs(error) for error in errors) if errors else None,
        bias=100 * statistics.median(errors) if errors else None,
        correlation=tau,
        fitting_right=sum(item.prediction.fits != item.oom for item in items),
        fitting_rows=len(items),
    )


def summaries(scored: Sequence[Scored]) -> list[FamilyScore]:
    """One score per family, in order of appearance, then one over all rows with the name ``all``."""
    families = list(dict.fromkeys(item.run.family for item in scored))
    found = [summarize(name, [item for item in scored if item.run.family == name]) for name in families]
    overall = summarize("all", scored)
    within = [score.correlation for score in found if score.correlation is not None]
    mean = sum(within) / len(within) if within else None
    return [
        *found,
        FamilyScore(
            "all", overall.rows, overall.median_error, overall.bias, mean, overall.fitting_right, overall.fitting_rows
        ),
    ]
