"""Fit the planner's constants to published runs, and show how well runs that were not fitted are predicted.

``python -m tools.calibrate FILE.csv`` leaves out one family of runs after the other, fits the
constants to the rest, and predicts the family left out: no family predicts itself. The constants that ship with the
package come from the fit to all rows (``--print-constants``).

The fit is a damped least-squares in the logarithm of each constant, on the logarithm of predicted over measured time.
Rows far off (a run on a broken network, a typing error) weigh less the further they are; each family weighs as the
square root of its rows; each constant is held near its physical expectation by a prior, so a constant that the runs
say nothing about stays where physics puts it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_megatron.planner.cost.makespan import closed_form
from lightning_megatron.planner.cost.prediction import Prediction, predict
from lightning_megatron.planner.model.constants import DEFAULT_CONSTANTS, PRIORS, SPREAD, Constants
from lightning_megatron.planner.runs.runs import PublishedRun, read_rows, run_from_row
from lightning_megatron.planner.runs.scoring import FamilyScore, Scored, measured_seconds, score_row, summaries
from tools.error_plot import error_svg

_SCALE = 0.12
"""Relative error beyond which a row counts as far off."""
_STEP = 1e-3


@dataclass(frozen=True, slots=True)
class Sample:
    """A run with its measured seconds and its weight in the fit."""

    row: Mapping[str, str]
    run: PublishedRun
    seconds: float
    weight: float


def read_samples(rows: Sequence[Mapping[str, str]]) -> list[Sample]:
    """The rows that have a measured time in any form, weighted by family."""
    found = []
    for row in rows:
        run = run_from_row(row)
        seconds = measured_seconds(row, run, _quick(run, DEFAULT_CONSTANTS))
        if seconds is not None:
            found.append((row, run, seconds))
    sizes: dict[str, int] = {}
    for _, run, _ in found:
        sizes[run.family] = sizes.get(run.family, 0) + 1
    return [Sample(row, run, seconds, sizes[run.family] ** -0.5) for row, run, seconds in found]


def _errors(samples: Sequence[Sample], constants: Constants) -> list[float]:
    """Logarithm of predicted over measured time, row by row."""
    return [math.log(_quick(s.run, constants).iteration_seconds / s.seconds) for s in samples]


def _quick(run: PublishedRun, constants: Constants) -> Prediction:
    """A prediction by the closed forms of the bubble, for a fit makes thousands."""
    return predict(run.shape, run.recipe, run.cluster, constants=constants, makespan=closed_form)


def _loss(samples: Sequence[Sample], errors: Sequence[float], logs: Sequence[float], names: Sequence[str]) -> float:
    """Cauchy loss of the rows plus the priors' squares."""
    rows = sum(s.weight * math.log1p((e / _SCALE) ** 2) for s, e in zip(samples, errors, strict=True))
    prior = sum(((log - math.log(PRIORS[name])) / SPREAD[name]) ** 2 for log, name in zip(logs, names, strict=True))
    return rows + prior


def _constants(names: Sequence[str], logs: Sequence[float]) -> Constants:
    """Constants from their logarithms; shares stay below 1."""
    shares = ("gemm_", "attention_", "nvlink", "network", "memory", "tensor_hidden", "contention", "misaligned")
    values = {}
    for name, log in zip(names, logs, strict=True):
        value = math.exp(log)
        capped = name.startswith(shares) and name != "network_decay"
        values[name] = min(value, 0.97) if capped else value
    return Constants(**values)


def fit(samples: Sequence[Sample], iterations: int = 25) -> Constants:
    """Fit all constants to ``samples``, from the priors.

    Args:
        samples: measured runs.
        iterations: at most this many steps.
    """
    names = list(PRIORS)
    logs = [math.log(PRIORS[name]) for name in names]
    errors = _errors(samples, _constants(names, logs))
    loss, damping = _loss(samples, errors, logs, names), 1e-2
    for _ in range(iterations):
        slopes = _slopes(samples, names, logs, errors)
        candidate, better = _improve(samples, names, logs, errors, slopes, loss, damping)
        if candidate is None:
            damping *= 10
            if damping > 1e4:
                break
            continue
        errors, gain = _errors(samples, _constants(names, candidate)), loss - better
        logs, loss, damping = candidate, better, max(damping / 5, 1e-6)
        if gain < 1e-3:
            break
    return _constants(names, logs)


def _slopes(
    samples: Sequence[Sample], names: Sequence[str], logs: Sequence[float], errors: Sequence[float]
) -> list[list[float]]:
    """Derivative of every row's error by every constant's logarithm."""
    columns = []
    for index in range(len(names)):
        moved = list(logs)
        moved[index] += _STEP
        shifted = _errors(samples, _constants(names, moved))
        columns.append([(new - old) / _STEP for new, old in zip(shifted, errors, strict=True)])
    return columns


def _improve(
    samples: Sequence[Sample],
    names: Sequence[str],
    logs: Sequence[float],
    errors: Sequence[float],
    slopes: Sequence[Sequence[float]],
    loss: float,
    damping: float,
) -> tuple[list[float] | None, float]:
    """One damped step; None where it does not lower the loss."""
    weights = [s.weight / _SCALE**2 / (1 + (e / _SCALE) ** 2) for s, e in zip(samples, errors, strict=True)]
    jacobian, wide = np.array(slopes), np.array(weights)
    spread = np.array([SPREAD[name] for name in names])
    prior = np.array([math.log(PRIORS[name]) for name in names])
    matrix = (jacobian * wide) @ jacobian.T + np.diag(spread**-2)
    matrix[np.diag_indices_from(matrix)] *= 1 + damping
    right = -(jacobian @ (wide * np.array(errors))) - (np.array(logs) - prior) / spread**2
    step = np.linalg.solve(matrix, right).clip(-0.5, 0.5).tolist()
    candidate = [log + value for log, value in zip(logs, step, strict=True)]
    better = _loss(samples, _errors(samples, _constants(names, candidate)), candidate, names)
    return (candidate, better) if better < loss else (None, loss)


def folds(samples: Sequence[Sample]) -> list[str]:
    """Families in order of appearance; each is one fold."""
    return list(dict.fromkeys(sample.run.family for sample in samples))


def score(samples: Sequence[Sample], constants: Constants) -> list[Scored]:
    """Predict every sample with ``constants`` and put it beside its measurement."""
    return [
        score_row(s.row, s.run, predict(s.run.shape, s.run.recipe, s.run.cluster, constants=constants)) for s in samples
    ]


def cross_validate(samples: Sequence[Sample]) -> list[Scored]:
    """Predict every family with constants fitted to all other families."""
    found: list[Scored] = []
    for family in folds(samples):
        constants = fit([sample for sample in samples if sample.run.family != family])
        found += score([sample for sample in samples if sample.run.family == family], constants)
    return found


def table(scores: Sequence[FamilyScore]) -> str:
    """Scores as a Markdown table."""
    lines = ["| family | rows | median error | bias | Kendall | memory verdicts |", "|---|---:|---:|---:|---:|---:|"]
    for score_ in scores:
        tau = "-" if score_.correlation is None else f"{score_.correlation:.2f}"
        error = "-" if score_.median_error is None else f"{score_.median_error:.1f}%"
        bias = "-" if score_.bias is None else f"{score_.bias:+.1f}%"
        fitting = f"{score_.fitting_right}/{score_.fitting_rows}"
        lines.append(f"| {score_.family} | {score_.rows} | {error} | {bias} | {tau} | {fitting} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: print the table of the folds, or the constants of the fit to all rows."""
    parser = argparse.ArgumentParser(prog="python -m tools.calibrate", description=__doc__)
    parser.add_argument("file", help="CSV of published runs")
    parser.add_argument("--print-constants", action="store_true", help="fit all rows and print the constants as JSON")
    parser.add_argument("--no-folds", action="store_true", help="score the fit to all rows on those rows themselves")
    parser.add_argument("--plot", help="write predicted against measured times of the folds to this SVG file")
    options = parser.parse_args(arguments)
    samples = read_samples(read_rows(options.file))
    if options.print_constants or options.no_folds:
        constants = fit(samples)
        if options.print_constants:
            print(json.dumps(constants.as_dict(), indent=1))
        if options.no_folds:
            print(table(summaries(score(samples, constants))))
        return 0
    scored = cross_validate(samples)
    print(table(summaries(scored)))
    if options.plot:
        Path(options.plot).write_text(error_svg(scored), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
