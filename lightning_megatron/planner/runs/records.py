"""Predicts the runs of a CSV file, and turns the predictions into plain records for JSON and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_megatron.planner.cost.prediction import Prediction, predict
from lightning_megatron.planner.model.cluster import GIB
from lightning_megatron.planner.model.constants import DEFAULT_CONSTANTS, Constants
from lightning_megatron.planner.runs.runs import PublishedRun, read_rows, run_from_row
from lightning_megatron.planner.runs.scoring import FamilyScore, Scored, convention_tflops, score_row, summaries


@dataclass(frozen=True, slots=True)
class PredictedRow:
    """Outcome of one row: a prediction, or an error.

    Attributes:
        id: of the row.
        row: the cells, by column.
        run: the run that the row describes; None with an error.
        prediction: None with an error.
        error: message, or None.
    """

    id: str
    row: Mapping[str, str]
    run: PublishedRun | None
    prediction: Prediction | None
    error: str | None


def predict_rows(rows: Sequence[Mapping[str, str]], constants: Constants = DEFAULT_CONSTANTS) -> list[PredictedRow]:
    """Predict every row; for a row that cannot be predicted, the result holds the error message."""
    found = []
    for number, row in enumerate(rows, start=1):
        name = row.get("id") or f"row {number}"
        try:
            run = run_from_row(row, name)
            prediction = predict(run.shape, run.recipe, run.cluster, constants=constants, remarks=run.remarks)
            found.append(PredictedRow(name, row, run, prediction, None))
        except ValueError as error:
            found.append(PredictedRow(name, row, None, None, str(error)))
    return found


def predict_file(path: str | Path, constants: Constants = DEFAULT_CONSTANTS) -> list[PredictedRow]:
    """Predict every row of a CSV file.

    Raises:
        ValueError: a required column is missing.
    """
    return predict_rows(read_rows(path), constants)


def score_rows(predicted: Sequence[PredictedRow]) -> list[Scored | None]:
    """Compare predictions with the measured columns of their rows; None for rows without a prediction."""
    return [
        score_row(item.row, item.run, item.prediction) if item.run and item.prediction else None for item in predicted
    ]


def record(item: PredictedRow, scored: Scored | None = None) -> dict[str, Any]:
    """One row as plain data for JSON: seconds, TFLOP/s per GPU in the row's convention, GiB on the fullest rank."""
    if item.run is None or item.prediction is None:
        return {"id": item.id, "error": item.error}
    prediction = item.prediction
    values: dict[str, Any] = {
        "id": item.id,
        "family": item.run.family,
        "iteration_seconds": prediction.iteration_seconds,
        "tflops_per_gpu": convention_tflops(item.run, prediction),
        "flops_convention": item.run.convention or "model",
        "memory_gib": prediction.memory.total / GIB,
        "capacity_gib": prediction.capacity / GIB,
        "fits": prediction.fits,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "tokens_per_second_per_gpu": prediction.tokens_per_second / item.run.recipe.world,
        "layout": item.run.recipe.describe(),
        "seconds": asdict(prediction.breakdown),
        "remarks": list(prediction.remarks),
    }
    if scored is not None:
        values["measured_seconds"] = scored.seconds
        values["error_percent"] = None if scored.error is None else 100 * scored.error
        values["measured_out_of_memory"] = scored.oom
    return values


def family_records(scored: Sequence[Scored | None]) -> list[dict[str, Any]]:
    """Scores per family and over all rows, as plain data for JSON."""
    return [asdict(score) for score in family_scores(scored)]


def family_scores(scored: Sequence[Scored | None]) -> list[FamilyScore]:
    """Scores per family and over all predicted rows."""
    return summaries([item for item in scored if item is not None])
