"""Measured values of published runs, their FLOPs conventions, and how far predictions are from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_megatron.planner.cost.prediction import Prediction
from lightning_megatron.planner.runs.runs import Run


def convention_flops(run: Run, prediction: Prediction) -> float:
    """FLOPs of one step as the run's own convention counts them.

    * ``hardware x4 (old estimate ...)``: 96 B s l h^2, the layers' products with recomputation and nothing else;
    * ``... full recompute`` and ``x4``: 96 B s l h^2 (1 + s/(6h) + V/(16lh)), equation 3 of arXiv 2104.04473;
    * other ``hardware``: model FLOPs plus what the run recomputes;
    * all else: model FLOPs, attention counted in full.
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


def convention_tflops(run: Run, prediction: Prediction) -> float:
    """Predicted TFLOP/s per GPU in the run's own convention."""
    return convention_flops(run, prediction) / prediction.iteration_seconds / run.recipe.world / 1e12


def measured_number(row: Mapping[str, str], column: str) -> float | None:
    """A measured cell's number; None where it is empty or not one (``OOM``)."""
    try:
        value = float(row.get(column) or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def measured_seconds(row: Mapping[str, str], run: Run, prediction: Prediction) -> float | None:
    """Measured seconds of a step: as given, else from tokens/s, TFLOP/s or MFU in the row's convention."""
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
    """Whether a row records an out-of-memory failure instead of a time."""
    marks = [row.get(column, "").strip().lower() for column in ("mem_gb", "iter_s", "iter_s_kind", "tok_s_gpu")]
    if any(mark in ("oom", "out of memory") for mark in marks):
        return True
    notes = row.get("notes", "").lower()
    return "oom" in notes and "close to oom" not in notes and measured_number(row, "iter_s") is None


@dataclass(frozen=True, slots=True)
class Scored:
    """One prediction beside its measurement."""

    run: Run
    prediction: Prediction
    seconds: float | None
    oom: bool

    @property
    def error(self) -> float | None:
        """Signed relative error of the step's time."""
        if self.seconds is None:
            return None
        return self.prediction.iteration_seconds / self.seconds - 1.0


def score_row(row: Mapping[str, str], run: Run, prediction: Prediction) -> Scored:
    """Put a finished prediction beside the row's measured columns."""
    return Scored(run, prediction, measured_seconds(row, run, prediction), ran_out_of_memory(row))


def kendall(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Kendall's tau-b of two equally long sequences; None where it is undefined."""
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
    """Errors of one family (or of all rows): medians are absolute, in percent."""

    family: str
    rows: int
    median_error: float | None
    bias: float | None
    correlation: float | None
    fitting_right: int
    fitting_rows: int


def summarize(family: str, scored: Iterable[Scored]) -> FamilyScore:
    """Median absolute percentage error, median signed error, rank correlation of times, and memory verdicts."""
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
    """One score per family in order of appearance, then one over all rows named ``all``."""
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
