"""A rank holds its stage, and no more micro-batches than its schedule says: measured, not believed."""

from __future__ import annotations

import pytest
import torch

from tests.harness import run_trainers
from tests.pipeline.memory_scenarios import activations, held, late_built, late_pretrained


@pytest.mark.parametrize("stages", [2, 4])
def test_1f1b_holds_at_most_p_minus_r_micro_batches(stages: int) -> None:
    outcomes = run_trainers(activations, stages, 8, "1f1b", devices=stages)
    for rank, outcome in enumerate(outcomes):
        stage = stages - 1 - rank
        assert outcome.value["one"] > 0 and outcome.value["left"] == 0, outcome.value
        assert outcome.value["in_flight"] < stages - stage + 0.2, (stage, outcome.value)


def test_gpipe_holds_every_micro_batch_of_the_step() -> None:
    for outcome in run_trainers(activations, 2, 8, "gpipe", devices=2):
        assert 7.5 < outcome.value["in_flight"] < 8.2 and outcome.value["left"] == 0, outcome.value


def test_a_trial_of_the_loss_holds_four_micro_batches_of_one_sample_at_most() -> None:
    for rank, outcome in enumerate(run_trainers(activations, 2, 8, "1f1b", "auto", devices=2)):
        forwards = 2 * 8 + 5 + 4 * 2 + 4  # of two steps; five micro-batches, four times two and once four are tried
        assert outcome.value["left"] == 0, (rank, outcome.value)
        assert outcome.value["in_flight"] * forwards / 16 < 4.2, (rank, outcome.value)


@pytest.mark.parametrize("stages", [2, 4])
def test_after_setup_a_rank_holds_only_its_stage(stages: int) -> None:
    values = [outcome.value for outcome in run_trainers(held, stages, devices=stages)]
    assert sum(value["owned"] for value in values) == values[0]["whole"]
    assert len({name for value in values for name in value["names"]}) == sum(len(value["names"]) for value in values)
    for value in values:
        assert value["owned"] < 1.5 * value["whole"] / stages
        weights_and_gradients = 2 * 8 * value["owned"]  # float64, one main gradient each
        assert value["bytes"] < weights_and_gradients + 60_000, (value["bytes"], weights_and_gradients)


def test_a_module_built_on_the_meta_device_starts_alike_in_every_layout() -> None:
    (single,) = [outcome.value for outcome in run_trainers(late_built, (1, 1), devices=1)]
    assert all(weight.float().std() > 0 for name, weight in single.items() if name.endswith("c_attn.weight"))
    for layout in ((2, 1), (4, 1), (2, 2)):
        values = [outcome.value for outcome in run_trainers(late_built, layout, devices=layout[0] * layout[1])]
        assert {name for value in values for name in value} == set(single)
        for value in values:
            assert len(value) < len(single)
            for name, weight in value.items():
                assert torch.equal(weight, single[name]), (layout, name)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_pretrained_class_built_on_the_meta_device_trains_alike_in_every_layout(name: str) -> None:
    (single,) = [outcome.value for outcome in run_trainers(late_pretrained, (1, 1), name, devices=1)]
    for outcome in run_trainers(late_pretrained, (2, 1), name, devices=2):
        assert outcome.value == pytest.approx(single, abs=1e-5)
