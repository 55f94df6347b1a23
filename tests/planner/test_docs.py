"""The planning page says what the planner does: its examples run, its constants are the shipped ones."""

from __future__ import annotations

import re
from pathlib import Path

from lightning_megatron.planner import DEFAULT_CONSTANTS, Cluster
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
