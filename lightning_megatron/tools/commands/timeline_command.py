"""``lightning-megatron timeline``: checks, simulates and draws a pipeline schedule."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from lightning_megatron.pipeline.pictures.drawing import chrome_trace, svg, text_grid, title
from lightning_megatron.pipeline.pictures.image import png
from lightning_megatron.pipeline.schedules.by_name import SCHEDULES, make_schedule
from lightning_megatron.pipeline.schedules.check import check
from lightning_megatron.pipeline.schedules.custom import UserSchedule
from lightning_megatron.pipeline.schedules.dependencies import Costs
from lightning_megatron.pipeline.schedules.simulation import Timeline, simulate
from lightning_megatron.tools.commands.conduct import refusing, working

_WIDEST = 1000  # widest text grid that is printed, in characters
_MOST_PASSES = 200_000  # forward passes of a schedule that is simulated within ten seconds
_MOST_STAGES = 16  # whose activations are listed one by one


def timeline(
    schedule: Annotated[
        str, typer.Option(help=f"One of {', '.join(SCHEDULES)}; or your own function as module:function.")
    ] = "1f1b",
    stages: Annotated[int, typer.Option(help="Pipeline stages, p.")] = 4,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per step, m.")] = 8,
    chunks: Annotated[
        int | None, typer.Option(help="Model chunks per stage, v; the schedule's own if left out.")
    ] = None,
    forward: Annotated[
        float, typer.Option(help="Time of one F, the forward of one chunk (halve it to compare two chunks with one).")
    ] = 1.0,
    backward_input: Annotated[float, typer.Option(help="Time of one I; an unsplit backward B takes I + W.")] = 1.0,
    backward_weight: Annotated[float, typer.Option(help="Time of one W.")] = 1.0,
    p2p: Annotated[float, typer.Option(help="Latency of a transfer between stages.")] = 0.0,
    p2p_link: Annotated[float, typer.Option(help="Time that a transfer occupies its link (size / bandwidth).")] = 0.0,
    group_size: Annotated[int | None, typer.Option(help="interleaved: micro-batches per group, at least p.")] = None,
    memory_limit: Annotated[int | None, typer.Option(help="zb-h2: micro-batches in flight, p to 2p-1.")] = None,
    placement: Annotated[str | None, typer.Option(help="Your own schedule: loop or vee.")] = None,
    forward_only: Annotated[bool, typer.Option(help="The evaluation order of this schedule.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures and instructions as JSON.")] = False,
    svg_file: Annotated[Path | None, typer.Option("--svg", help="Write the picture to this file.")] = None,
    png_file: Annotated[Path | None, typer.Option("--png", help="Write the picture as PNG to this file.")] = None,
    trace_file: Annotated[Path | None, typer.Option("--trace", help="Write a Chrome trace to this file.")] = None,
) -> None:
    """Check a schedule, simulate it with given costs, and draw it.

    The bubble is idle over busy time inside the longest rank's own span, as in
    the literature; "of the step" also counts the wait for the slowest rank.
    """
    options = {
        name: value for name, value in (("group_size", group_size), ("memory_limit", memory_limit)) if value is not None
    }
    from lightning_megatron.pipeline.schedules.text import counted

    with refusing(), working(f"simulating {counted(stages, 'stage')} and {counted(micro_batches, 'micro-batch')}"):
        _check_folders({"--svg": svg_file, "--png": png_file, "--trace": trace_file})
        _check_numbers(
            {
                "--forward": forward,
                "--backward-input": backward_input,
                "--backward-weight": backward_weight,
                "--p2p": p2p,
                "--p2p-link": p2p_link,
            },
            stages * micro_batches * (chunks or 1),
        )
        made = make_schedule(
            _schedule(schedule), stages, micro_batches, chunks=chunks, placement=placement,
            forward_only=forward_only, **options,
        )  # fmt: skip
        check(made)
        costs = Costs.uniform(
            made.virtual_stages,
            forward,
            backward_input,
            backward_weight,
            latency=p2p,
            message_size=p2p_link,
            bandwidth=1.0,
        )
        found = simulate(made, costs)
        written = _write(found, svg_file, png_file, trace_file)
    _print(found, as_json, written)


def figures(found: Timeline) -> dict[str, Any]:
    """Content of the JSON output.

    Returns:
        ``makespan``, ``bubble_fraction`` (idle/busy), ``step_bubble_fraction``, ``peak_activations`` (per rank, in
        chunks), ``instructions`` (per rank, strings such as ``F0.1``: kind, micro-batch, chunk), and the sizes.
    """
    schedule = found.schedule
    return {
        "schedule": schedule.name,
        "stages": schedule.stages,
        "chunks": schedule.chunks,
        "micro_batches": schedule.micro_batches,
        "makespan": found.makespan,
        "bubble_fraction": found.bubble_fraction,
        "step_bubble_fraction": found.step_bubble_fraction,
        "peak_activations": list(found.peak_activations),
        "instructions": [[str(step) for step in steps] for steps in schedule.instructions],
    }


def _check_numbers(costs: Mapping[str, float], passes: int) -> None:
    """Refuse invalid times, and schedules that would take minutes to simulate.

    Raises:
        ValueError: with the argument to change.
    """
    for name, value in costs.items():
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"`{name} {value}` must be a finite time, not below 0")
    if passes > _MOST_PASSES:
        raise ValueError(
            f"stages x micro-batches x chunks = {passes:,} passes, of which at most {_MOST_PASSES:,} are simulated; a "
            "schedule repeats itself, so fewer `--micro-batches` (a few times `--stages`) show the same"
        )


def _check_folders(files: Mapping[str, Path | None]) -> None:
    """Refuse files that cannot be written before the work for them is done.

    Raises:
        ValueError: with the option and the folder.
    """
    for option, file in files.items():
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            why = "this is a folder" if file.is_dir() else f"there is no folder {file.parent}"
            raise ValueError(f"could not write `{option} {file}`: {why}; name a file in a folder that exists")


def _schedule(name: str) -> str | UserSchedule:
    """The schedule's name, or the function that ``module:function`` names, also from the current directory.

    Raises:
        ValueError: there is no such function.
    """
    if ":" not in name:
        return name
    module, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ValueError(f"--schedule {name}: {error}") from error
    finally:
        sys.path.pop(0)
    wanted = f"--schedule {name}: {function!r} is not a function (stages, chunks, micro_batches) -> lists"
    if not callable(found):
        raise ValueError(wanted)
    try:
        inspect.signature(found).bind(1, 1, 1)
    except (TypeError, ValueError) as error:  # ValueError: a function of C that does not tell its arguments
        raise ValueError(f"{wanted}: {error}") from error
    own: UserSchedule = found
    return own


def _write(found: Timeline, svg_file: Path | None, png_file: Path | None, trace_file: Path | None) -> list[Path]:
    """Write the requested files; returns their paths."""
    if svg_file is not None:
        svg_file.write_text(svg(found), encoding="utf-8")
    if png_file is not None:
        png_file.write_bytes(png(found))
    if trace_file is not None:
        trace_file.write_text(json.dumps(chrome_trace(found)), encoding="utf-8")
    return [path for path in (svg_file, png_file, trace_file) if path is not None]


def _print(found: Timeline, as_json: bool, written: list[Path]) -> None:
    if as_json:
        typer.echo(json.dumps(figures(found)))
        return
    typer.echo(title(found))
    peaks = [str(peak) for peak in found.peak_activations]
    shown = peaks if len(peaks) <= _MOST_STAGES else [*peaks[: _MOST_STAGES // 2], "...", *peaks[-_MOST_STAGES // 2 :]]
    typer.echo(f"bubble of the step {found.step_bubble_fraction:.1%}, peak activations per stage "
               f"{', '.join(shown)} {'chunk' if shown == ['1'] else 'chunks'}")  # fmt: skip
    busiest = max(map(len, found.schedule.instructions))
    if 3 * busiest > _WIDEST:  # a cell takes three characters or more
        typer.echo(f"(the grid is over {3 * busiest} characters wide: use --svg or --trace)")
    else:
        grid = text_grid(found)
        widest = max(map(len, grid.splitlines()))
        typer.echo(grid if widest <= _WIDEST else f"(the grid is {widest} characters wide: use --svg or --trace)")
    for path in written:
        typer.echo(f"wrote {path}")
