"""Balancing losses of the whole batch, in micro-batches: a pass of counts makes the step that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron.experts.balance.of_parts import PartsOfBatch
from tests.experts.expert_scenarios import fit
from tests.harness import one_process, run_trainers

WIDE = pytest.mark.wide
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "micro_batch_size": 4}
PIPE: dict[str, Any] = {"pipeline_parallel_size": 2, "expert_parallel_size": 2, "micro_batch_size": 2}
ZB: dict[str, Any] = {**PIPE, "pipeline_schedule": "zb-v", "activation_recompute": "full"}
DRAWN: dict[str, Any] = {"random_streams": "layout"}
COUNTED, WHOLE = "a pass of counts, forward only, goes before each step", "each batch runs whole"
TWICE: dict[str, Any] = {"accumulate_grad_batches": 2}

ROWS: list[Any] = [
    ("drop_in", 2, STAGES, {}),
    ("balanced_Mixtral", 4, PIPE, {}),
    ("masked", 2, {"micro_batch_size": 3, **DRAWN}, {}),
    ("hooked_weights", 2, STAGES, {}),
    *(
        pytest.param(*row, marks=WIDE)
        for row in (
            ("drop_in", 1, {"micro_batch_size": 5}, {}),
            ("drop_in", 2, {"micro_batch_size": 2, "optimizer_sharding": False}, TWICE),
            ("drop_in", 4, ZB, {}),
            ("hooked_weights", 4, ZB, {}),
            ("hooked_weights", 2, {"micro_batch_size": 5}, TWICE),
            ("drop_in", 4, {**PIPE, "pipeline_schedule": "interleaved"}, TWICE),
            ("drop_in", 4, {**STAGES, "tensor_parallel_size": 2}, {}),
            ("drop_in", 4, {**PIPE, "weight_sharding": True}, {}),
            ("masked", 4, {**ZB, **DRAWN, "activation_recompute": None}, {}),
            ("masked", 2, {**STAGES, **DRAWN, "pipeline_schedule": "zb-h1"}, TWICE),
            ("balanced_Qwen3Moe", 1, {"micro_batch_size": 3}, TWICE),
            ("balanced_Olmoe", 4, ZB, {}),
            ("balanced_GptOss", 2, {**STAGES, "pipeline_schedule": "gpipe"}, {}),
        )
    ),
]


def _compare(found: dict[str, Any], expected: dict[str, Any], within: float) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=within)
    assert set(found["weights"]) == set(expected["weights"])
    for key, value in found["weights"].items():
        torch.testing.assert_close(value, expected["weights"][key], rtol=within, atol=within, msg=key)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("name", "devices", "options", "trainer"), ROWS, ids=str)
def test_a_step_in_micro_batches_is_that_of_one_process(name, devices, options, trainer):
    drawn = DRAWN if "random_streams" in options else None
    expected = one_process(fit, name, drawn, trainer)
    outcomes = run_trainers(fit, name, options, trainer, devices=devices)
    said = "".join(outcome.output for outcome in outcomes)
    assert COUNTED in said
    assert WHOLE not in said
    _compare(outcomes[0].value, expected, 1e-6 if name.startswith("balanced") else 1e-9)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=WIDE)])
def test_each_replicas_own_loss_is_that_of_its_whole_batch(devices):
    own = {"expert_balance": "replica"}
    whole = run_trainers(fit, "drop_in", own, {}, devices=devices)[0].value
    outcomes = run_trainers(fit, "drop_in", {**own, "micro_batch_size": 4}, {}, devices=devices)
    assert COUNTED in outcomes[0].output
    _compare(outcomes[0].value, whole, 1e-9)


@pytest.mark.wide
def test_a_balancing_loss_that_is_no_summand_keeps_batches_whole():
    expected = one_process(fit, "multiplied", None, {})
    outcomes = run_trainers(fit, "multiplied", STAGES, {}, devices=2)
    assert COUNTED not in "".join(outcome.output for outcome in outcomes)
    _compare(outcomes[0].value, expected, 1e-9)


def test_a_balancing_loss_that_begins_in_a_later_step_is_that_of_one_process():
    _compare(run_trainers(fit, "late", STAGES, {}, devices=2)[0].value, one_process(fit, "late", None, {}), 1e-9)


def test_a_balancing_loss_that_begins_unforeseen_is_refused():
    outcomes = run_trainers(fit, "late_unread", STAGES, {}, devices=2, check=False, grace=20.0)
    assert any("no trial had seen it before" in str(outcome.error) for outcome in outcomes)
    assert all(outcome.error for outcome in outcomes)


def test_what_was_noted_of_a_micro_batch_is_found_by_its_place():
    parts = PartsOfBatch()
    with parts.noting(2):
        for part in (0, 1, 1):  # run twice, by a stage of several chunks
            parts.at(part)
            parts.note(10 * part)
            parts.note(10 * part + 1)
    parts.join([2.0, 4.0], sum)
    parts.at(1)
    assert [parts.taken(), parts.taken()] == [(10, 1, 4.0), (12, 1, 4.0)]
    with pytest.raises(ValueError, match="no trial had seen it"):
        parts.taken()
