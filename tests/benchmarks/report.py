"""From rounds to ratios: medians, spread, a line to read and a record to keep."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import lightning
import torch

from tests.benchmarks.contestants import WARM_UP, Round

HISTORY = Path(__file__).parent / "history.jsonl"


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread per rank, load {os.getloadavg()[0]:.0f}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "warm_up": WARM_UP,
    }


def summarize(ranks: list[list[tuple[Round, Round]]]) -> dict[str, Any]:
    """Ours and theirs, of the slowest rank's wall time and of all ranks' processor time.

    Returns:
        Per measure: medians in ms, the median of the ratios round by round, its quartiles, and the ratio of the best
        rounds, which neighbours on the machine disturb least; and the last losses, which show that the work was equal;
        and the peak of live tensors on the fullest rank.
    """
    report: dict[str, Any] = {}
    for measure, combine in (("seconds", max), ("cpu", sum)):
        sides = [
            [combine(getattr(rank[index][side], measure) for rank in ranks) for index in range(len(ranks[0]))]
            for side in (0, 1)
        ]
        ratios = sorted(one / other for one, other in zip(*sides, strict=True))
        report[measure] = {
            "ours_ms": round(statistics.median(sides[0]) * 1e3, 3),
            "theirs_ms": round(statistics.median(sides[1]) * 1e3, 3),
            "ratio": round(statistics.median(ratios), 4),
            "quartiles": [round(ratios[len(ratios) // 4], 4), round(ratios[-1 - len(ratios) // 4], 4)],
            "best": round(min(sides[0]) / min(sides[1]), 4),
        }
    losses = [[rank[-1][side].loss for rank in ranks if not math.isnan(rank[-1][side].loss)] for side in (0, 1)]
    report["losses"] = losses
    peaks = [max(rank[-1][side].peak for rank in ranks) for side in (0, 1)]
    if all(peaks):
        report["peak"] = {
            "ours_mb": round(peaks[0] / 1e6, 3),
            "theirs_mb": round(peaks[1] / 1e6, 3),
            "ratio": round(peaks[0] / peaks[1], 4),
        }
    return report


def line(name: str, peer: str, summary: dict[str, Any]) -> str:
    """One row of the table that the command prints."""
    cells = []
    for measure in ("seconds", "cpu"):
        found = summary[measure]
        low, high = found["quartiles"]
        cells.append(
            f"{found['ours_ms']:9.2f} {found['theirs_ms']:9.2f} {found['ratio']:6.3f} ({low:.2f}..{high:.2f}; best "
            f"{found['best']:.3f})"
        )
    peak = summary.get("peak")
    held = f"{peak['ours_mb']:8.2f} {peak['theirs_mb']:8.2f} {peak['ratio']:6.3f}" if peak else 24 * " "
    return f"{name:16s} {cells[0]}   {cells[1]}   {held}   {peer}"


def keep(entry: dict[str, Any], path: Path = HISTORY) -> None:
    """Append a run to the history, one JSON object per line."""
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")
