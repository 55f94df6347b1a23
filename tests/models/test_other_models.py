"""Hugging Face models besides language models with the usual loss train as in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_trainers
from tests.models.other_models import KINDS, SPLIT, train
from tests.parity.scenario import Layout, differences

INTERLEAVED = {"pipeline_schedule": "interleaved", "virtual_pipeline_parallel_size": 2}
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "stages": ((2, 1), {}),
    "alone": ((1, 1), {}),
    "interleaved": ((2, 1), INTERLEAVED),
    "zb-v": ((2, 1), {"pipeline_schedule": "zb-v"}),
}
QUICK = {("stages", "hidden_states"), ("stages", "segmentation"), ("stages", "answers")}


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(layout, kind, marks=() if (layout, kind) in QUICK else pytest.mark.wide)
        for layout in LAYOUTS
        for kind in KINDS
        if kind != "captions" or layout in ("stages", "interleaved")
    ],
)
def test_a_model_trains_as_in_one_process(layout: str, kind: str) -> None:
    (plain,) = run_trainers(train, None, {}, kind, devices=1)
    shape, arguments = LAYOUTS[layout]
    devices = shape[0] * shape[1]
    for outcome in run_trainers(train, shape, arguments, kind, devices=devices):
        if outcome.rank == 0:
            found = list(differences("", outcome.value, plain.value, KINDS[kind].tolerance))
            assert not found, f"{layout}: " + "\n".join(found[:10])


@pytest.mark.wide
@pytest.mark.parametrize("kind", SPLIT)
def test_a_model_split_over_tensor_ranks_trains_as_in_one_process(kind: str) -> None:
    (plain,) = run_trainers(train, None, {}, kind, devices=1)
    for outcome in run_trainers(train, (1, 1), {"tensor_parallel_size": 2}, kind, devices=2):
        if outcome.rank == 0:
            found = list(differences("", outcome.value, plain.value, SPLIT[kind].tolerance))
            assert not found, "\n".join(found[:10])
