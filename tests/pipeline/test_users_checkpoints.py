"""Activation checkpoints of the user's own: exact around one layer, refused around several."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_trainers
from tests.pipeline import users_checkpoint_scenarios as written

WIDE = pytest.mark.wide
TWO = {"pipeline_parallel_size": 2, "micro_batch_size": 2}
ZERO_BUBBLE = {**TWO, "pipeline_schedule": "zb-v"}
INTERLEAVED = {**TWO, "virtual_pipeline_parallel_size": 2, "pipeline_schedule": "interleaved"}
FOUR = {"pipeline_parallel_size": 4, "micro_batch_size": 2}
TENSOR = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"*.up": "colwise", "*.down": "rowwise"}}

REFUSED = [
    (written.InSegments, TWO, 2, False),
    (written.InSegments, {**TWO, **TENSOR}, 4, False),
    (written.InSegments, FOUR, 4, True),
    (written.InSegments, INTERLEAVED, 2, True),
    (written.InSegments, ZERO_BUBBLE, 2, True),
    (written.InSegments, TWO, 4, True),
    (written.AroundLast, TWO, 2, False),
    (written.AroundLast, FOUR, 4, True),
    (written.Reentrant, TWO, 2, False),
    (written.Reentrant, FOUR, 4, True),
    (written.OutsideOthers, TWO, 2, True),
    (written.Twice, TWO, 2, True),
]
EXACT = [
    (written.InEvaluation, TWO, 2, True),
    (written.HookedOnly, TWO, 2, True),
    (written.Frozen, TWO, 2, True),
    (written.Gated, TWO, 2, False),
    (written.Gated, FOUR, 4, True),
    (written.Gated, ZERO_BUBBLE, 2, True),
    (written.Gated, INTERLEAVED, 2, True),
    (written.GatedByName, TWO, 2, True),
    (written.GatedByName, FOUR, 4, True),
]


def _rows(cases: list[Any]) -> list[Any]:
    return [
        pytest.param(*case[:3], marks=WIDE if case[3] else (), id=f"{case[0].__name__}-{at}")
        for at, case in enumerate(cases)
    ]


@pytest.mark.parametrize(("build", "layout", "devices"), _rows(REFUSED))
def test_a_checkpoint_around_several_layers_is_refused_on_every_rank(
    build: Any, layout: dict[str, Any], devices: int
) -> None:
    for outcome in run_trainers(written.fit, build, layout, devices=devices, check=False, grace=20, deadline=60):
        said = f"{outcome.error}\n{outcome.output}"
        assert outcome.error is not None and "one checkpoint per layer" in said
        assert "users_checkpoint_scenarios.py:" in said


@pytest.mark.parametrize(("build", "layout", "devices"), _rows(EXACT))
def test_what_is_recomputed_layer_by_layer_trains_as_one_process(
    build: Any, layout: dict[str, Any], devices: int
) -> None:
    one = run_trainers(written.fit, build, None, devices=1)[0].value
    spread = run_trainers(written.fit, build, layout, devices=devices)[0].value
    assert one.keys() == spread.keys()
    for name, weight in one.items():
        torch.testing.assert_close(spread[name], weight, rtol=1e-9, atol=1e-11)
