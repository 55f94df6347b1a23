"""The planning page says what the planner does: its examples run, its constants are the shipped ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_megatron.pipeline.schedules.by_name import make_schedule
from lightning_megatron.pipeline.schedules.simulation import simulate
from lightning_megatron.planner import DEFAULT_CONSTANTS, Cluster, ModelShape, Recipe
from lightning_megatron.planner.cost.memory import state_bytes
from lightning_megatron.planner.model.constants import PRIORS
from lightning_megatron.planner.runs.runs import MEASURED, read_rows

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")


def test_the_examples_run() -> None:
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(block, names)


def test_the_yaml_describes_a_cluster(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "cluster.yaml"
    path.write_text(block)
    cluster = Cluster.from_yaml(path)
    assert (cluster.gpu.name, cluster.gpu.bandwidth, cluster.network_latency) == ("H100-500W", 2400e9, 8e-6)


def test_the_constants_on_the_page_are_those_in_use() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+)( ms|%)? \| ([\d.]+)(?: ms|%)? \|", PAGE, re.MULTILINE)
    scale = {"": 1.0, " ms": 1e-3, "%": 1e-2}
    shipped = DEFAULT_CONSTANTS.as_dict()
    found = {
        name: (float(expected) * scale[unit], float(fitted) * scale[unit]) for name, expected, unit, fitted in rows
    }
    assert set(found) == set(PRIORS)
    for name, (expected, fitted) in found.items():
        assert abs(expected - PRIORS[name]) < 1e-9
        assert abs(fitted - shipped[name]) < 0.01 * shipped[name]


def test_every_column_of_the_published_file_is_explained() -> None:
    unexplained = set(read_rows(ROOT / "tests" / "data" / "published_runs.csv")[0]) - set(re.findall(r"`(\w+)`", PAGE))
    assert unexplained <= {"source", "verified", "params_b", "iter_s_kind"}
    assert set(re.findall(r"`(\w+)`", PAGE)) >= MEASURED


def test_the_numbers_behind_choosing_sizes_are_the_planners() -> None:
    """18 bytes a parameter, of which 12 are divided by the replicas; 126 and 53 GB; bubbles below 25% and 10%."""
    page = " ".join((ROOT / "docs" / "choosing_sizes.md").read_text().split())
    shape = ModelShape(32, 4096, 32, 32000, 2048, gated=True, ffn=11008, tied=False)
    for replicas, gigabytes in ((1, 126), (8, 53)):
        recipe = Recipe(data=replicas, global_batch=4 * replicas)
        each = sum(state_bytes(shape, recipe, 0, 8)) / shape.parameters
        assert each == pytest.approx(6 + 12 / replicas) and 7 * each == pytest.approx(gigabytes, abs=0.6)
        assert f"{gigabytes} GB" in page
    for stages in (2, 4, 8):
        for times, most in ((4, 0.25), (10, 0.10)):
            assert simulate(make_schedule("1f1b", stages, times * stages)).bubble_fraction < most
            assert f"{times} p" in page and f"{round(100 * most)} %" in page
