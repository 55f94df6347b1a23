"""Training steps that call the layers more than once are those of one process, under pipelines too."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.generation.passes import ALONE, DRAWING, MODULES, REFUSALS, WHOLE, trained
from tests.harness import one_process, run_trainers

PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": PIPELINE,
    "pp2xtp2": {**PIPELINE, "tensor_parallel_size": 2},
    "pp2xdp2": {**PIPELINE, "data_parallel_size": 2},
    "pp4": {"pipeline_parallel_size": 4},
    "recompute": {**PIPELINE, "activation_recompute": "full"},
    "micro": {**PIPELINE, "micro_batch_size": 2, "whole_batch_loss": False},
    "interleaved": {**PIPELINE, "pipeline_schedule": "interleaved", "virtual_pipeline_parallel_size": 2},
    "zb-v": {**PIPELINE, "pipeline_schedule": "zb-v"},
    "shards": {**PIPELINE, "data_parallel_size": 2, "optimizer_sharding": True},
    "pp2xcp2": {**PIPELINE, "context_parallel_size": 2},
}
TURNS = "micro-batches of a `training_step` that calls the layers more than once take turns"
SHARED = "context ranks share the tokens of one at a time"
wide = pytest.mark.wide


def check(name: str, layout: str) -> None:
    options = LAYOUTS[layout]
    devices = 4 if layout in FOUR_RANKS else 2
    if name in DRAWING and "data_parallel_size" in options:  # each replica draws for the samples that it has
        alone = run_trainers(trained, name, {"data_parallel_size": 2}, devices=2)
        expected = [sum(step) / 2 for step in zip(*(one.value[0] for one in alone), strict=True)], alone[0].value[1]
    else:
        expected = one_process(trained, name, None)
    outcomes = run_trainers(trained, name, options, devices=devices)
    ranks = [outcome.value for outcome in outcomes]
    if layout != "micro":
        said = SHARED if layout == "pp2xcp2" else WHOLE.get(name, TURNS)
        assert said in re.sub(r"\s+", " ", outcomes[0].output), outcomes[0].output
    losses = [sum(step) / len(ranks) for step in zip(*(found for found, _ in ranks), strict=True)]
    tolerance = (
        1e-5 if name in ("preferring", "continued", "disabled", "rolling", "sampling", "dropped_sampling") else 1e-9
    )
    assert losses == pytest.approx(expected[0], rel=tolerance, abs=tolerance)
    weights = ranks[0][1]  # the other ranks are given none
    assert weights.keys() == expected[1].keys()
    for key, value in expected[1].items():
        torch.testing.assert_close(weights[key], value, rtol=tolerance, atol=tolerance, msg=key)


EVERYDAY = [
    *(("two_views", layout) for layout in ("recompute", "pp2xtp2", "pp2xdp2", "micro", "pp2xcp2")),
    *((name, "pp2") for name in ("gated", "recycled", "contrasted", "preferring")),
    *((name, "pp2") for name in ("dropped", "sampling", "continued")),
    *((name, "pp2") for name in ("kept", "moded", "listed", "counting", "padded", "paired")),
]
FOUR_RANKS = ("pp2xtp2", "pp2xdp2", "shards", "pp4", "pp2xcp2")
IN_TURN = (*FOUR_RANKS, "interleaved", "zb-v", "recompute", "micro")  # of which each module meets every third one
REST = [
    (name, layout)
    for turn, name in enumerate(sorted(MODULES))
    for layout in LAYOUTS
    if (name, layout) not in EVERYDAY and (layout not in IN_TURN or (turn + IN_TURN.index(layout)) % 3 == 0)
]


@pytest.mark.everyday(2)
@pytest.mark.parametrize(("name", "layout"), EVERYDAY)
def test_a_step_of_several_passes_is_that_of_one_process(name: str, layout: str) -> None:
    check(name, layout)


@wide
@pytest.mark.parametrize(("name", "layout"), REST)
def test_steps_of_several_passes_are_those_of_one_process(name: str, layout: str) -> None:
    alone = ("micro",) if name in DRAWING else ("pp2xdp2", "shards", "micro")
    if (name in ALONE and layout in alone) or (layout == "micro" and name in ("padded", "summed")):
        pytest.skip("a loss over all samples of a batch, or numbers of its own in each part of it")
    if (name, layout) == ("continued", "recompute"):
        pytest.skip("refused: see below")
    if (name, layout) == ("dropped", "pp2xtp2"):
        pytest.skip("masks inside of split layers are drawn by each tensor rank, in one pass or several")
    check(name, layout)


@pytest.mark.parametrize("name", ["keeping", *(pytest.param(name, marks=wide) for name in ("writing", "penalised"))])
def test_a_pass_whose_gradient_only_one_stage_knows_is_refused_on_every_rank(name: str) -> None:
    for outcome in run_trainers(trained, name, PIPELINE, devices=2, check=False, grace=20):
        assert "killed" not in (outcome.error or ""), f"rank {outcome.rank} hung"
        words = REFUSALS[name][1]
        assert words in f"{outcome.error}\n{outcome.output}", outcome


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=wide)])
def test_recomputed_layers_that_are_given_the_cache_of_an_earlier_call_are_refused(stages: int) -> None:
    options = {"pipeline_parallel_size": stages, "activation_recompute": "full"}
    for outcome in run_trainers(trained, "continued", options, devices=stages, check=False, grace=20):
        assert "is called again with the key-value cache" in f"{outcome.error}", outcome
