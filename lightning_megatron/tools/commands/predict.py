"""``lightning-megatron predict``: predicts every run of a CSV file, and scores the predictions on request."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_megatron.tools.commands.conduct import refusing, working

if TYPE_CHECKING:
    from lightning_megatron.planner.runs.records import PredictedRow
    from lightning_megatron.planner.runs.scoring import Scored


def predict(
    runs: Annotated[Path, typer.Option(help="CSV file of runs, with the columns that docs/planning.md lists.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    score: Annotated[bool, typer.Option("--score", help="Compare with the measured columns afterwards.")] = False,
) -> None:
    """Predict seconds per step, TFLOP/s per GPU, and memory of every run in a CSV file.

    Measured columns are never read for a prediction. With --score they are
    read after it, and errors are printed per family.
    """
    from lightning_megatron.planner.runs.records import predict_file, score_rows

    with refusing("--runs"), working(f"predicting the runs of {runs}"):
        predicted = predict_file(runs)
    for item in predicted:
        if item.error:
            typer.echo(f"not predicted: {item.error}", err=True)
    scored = score_rows(predicted) if score else [None] * len(predicted)
    if as_json:
        typer.echo(json.dumps(_document(predicted, scored, score), indent=1))
    else:
        _print_tables(predicted, scored, score)
    if predicted and all(item.error for item in predicted):
        raise typer.Exit(1)


def _document(predicted: Sequence[PredictedRow], scored: Sequence[Scored | None], score: bool) -> object:
    """Content of the JSON output: a list of rows; with scores, an object with ``rows`` and ``families``."""
    from lightning_megatron.planner.runs.records import family_records, record

    rows = [record(item, found) for item, found in zip(predicted, scored, strict=True)]
    return {"rows": rows, "families": family_records(scored)} if score else rows


def _print_tables(predicted: Sequence[PredictedRow], scored: Sequence[Scored | None], score: bool) -> None:
    """Print the table of runs, and with scores that of families."""
    from rich.console import Console
    from rich.table import Table

    from lightning_megatron.planner.runs.records import record

    table = Table("run", "layout", "seconds", "TFLOP/s/GPU", "GiB", "fits", *(["measured", "error"] if score else []))
    for item, found in zip(predicted, scored, strict=True):
        if item.error:
            continue
        values = record(item, found)
        cells = [
            item.id,
            values["layout"],
            f"{values['iteration_seconds']:.3f}",
            f"{values['tflops_per_gpu']:.1f}",
            f"{values['memory_gib']:.1f}",
            "yes" if values["fits"] else "no",
        ]
        if score:
            timed = found is not None and found.seconds is not None and found.error is not None
            cells += [f"{found.seconds:.3f}", f"{100 * found.error:+.1f}%"] if timed else ["-", "-"]  # type: ignore[union-attr,operator]
        table.add_row(*cells)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    if score:
        console.print(_families(scored))


def _families(scored: Sequence[Scored | None]) -> object:
    """Table of the scores per family."""
    from rich.table import Table

    from lightning_megatron.planner.runs.records import family_scores

    table = Table("family", "rows", "median error", "bias", "Kendall", "memory verdicts right")
    for found in family_scores(scored):
        table.add_row(
            found.family,
            str(found.rows),
            "-" if found.median_error is None else f"{found.median_error:.1f}%",
            "-" if found.bias is None else f"{found.bias:+.1f}%",
            "-" if found.correlation is None else f"{found.correlation:.2f}",
            f"{found.fitting_right}/{found.fitting_rows}",
        )
    return table
