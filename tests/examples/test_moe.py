"""The example that trains mixtures beside a dense model, tiny."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.script import run_in_workers

TINY = ("--hidden=16", "--sequence=16", "--vocabulary=300", "--batch=8", "--steps=3", "--validation-blocks=8")


@pytest.mark.wide
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.wide), 2])
def test_all_models_are_trained_and_drawn(tmp_path: Path, replicas: int) -> None:
    pytest.importorskip("matplotlib")
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"document{number:02}.txt").write_text(f"Expert {number % 4} takes what the router sends. " * 12)
    found = run_in_workers("moe.py", tmp_path, *TINY, "--data=texts", f"--replicas={replicas}", processes=replicas)
    assert found.code == 0, found.output
    rows = re.findall(r"^(dense|PR-MoE|MoE) +([\d,]+) +([\d,]+) +([\d.]+) +([\d.]+)", found.output, re.MULTILINE)
    assert [row[0] for row in rows] == ["dense", "PR-MoE", "MoE"], found.output
    weights, costs = ([int(row[at].replace(",", "")) for row in rows] for at in (1, 2))
    assert min(weights[1:]) > weights[0]
    assert all(abs(cost / costs[0] - 1) < 0.08 for cost in costs)
    assert "PR-MoE" in (tmp_path / "runs" / "moe" / "losses.svg").read_text()
