"""Buffers that several stages have, written before, between and behind the layers, are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_trainers
from tests.parity.scenario import differences
from tests.parity.zoo.data import BATCH
from tests.pipeline import buffer_scenarios as buffers

ZBV = {"pipeline_schedule": "zb-v", "micro_batch_size": BATCH // 2}
INTERLEAVED = {"pipeline_schedule": "interleaved", "virtual_pipeline_parallel_size": 2, "micro_batch_size": BATCH // 2}
EXACT = [name for name in buffers.NETS if name not in ("norm_around", "norm_everywhere", "norm_shared")]
QUICK = {
    ("before", "one"),
    ("norm_before", "zb-v"),
    ("affine_between", "one"),
    ("assigned", "interleaved"),
    ("lagging_between", "one"),
    ("stem", "one"),
    ("stem_whole", "zb-v"),
}
SCHEDULES: dict[str, dict[str, Any]] = {"one": {}, "zb-v": ZBV, "interleaved": INTERLEAVED}


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param(name, schedule, marks=() if (name, schedule) in QUICK else pytest.mark.wide)
        for name in [*EXACT, "listing"]
        for schedule in SCHEDULES
    ],
)
def test_one_stage_writes_and_all_have_it(name: str, schedule: str) -> None:
    _compare(name, SCHEDULES[schedule])


@pytest.mark.parametrize(
    ("name", "schedule", "wanted"),
    [
        ("norm_everywhere", "one", "`net.norm.running_mean`, of which one process has one"),
        pytest.param("norm_around", "one", "`net.norm.running_mean`, of which one", marks=pytest.mark.wide),
        pytest.param("norm_around", "zb-v", "`, of which one process has one", marks=pytest.mark.wide),
        pytest.param("norm_shared", "one", "running_mean`, of which one process has one", marks=pytest.mark.wide),
        pytest.param("penalty", "one", "depends on `net.layers.0`, which another", marks=pytest.mark.wide),
    ],
)
def test_what_several_stages_would_write_is_refused_on_every_rank(name: str, schedule: str, wanted: str) -> None:
    arguments = SCHEDULES[schedule]
    for outcome in run_trainers(buffers.train, (2, 1), arguments, name, devices=2, check=False, grace=20.0):
        assert outcome.error is not None and "killed" not in outcome.error, f"rank {outcome.rank}: {outcome.error}"
        assert wanted in f"{outcome.error}\n{outcome.output}", outcome.error


def _compare(name: str, arguments: dict[str, Any]) -> None:
    (plain,) = run_trainers(buffers.train, None, {}, name, devices=1)
    for outcome in run_trainers(buffers.train, (2, 1), arguments, name, devices=2)[:1]:  # who gathers the whole state
        found = list(differences("", outcome.value, plain.value, 1e-9))
        assert not found, f"rank {outcome.rank}: " + "\n".join(found[:10])
