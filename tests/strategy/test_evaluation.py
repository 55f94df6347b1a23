"""Evaluation in micro-batches gives what it gives for whole batches, whatever a step logs, returns and keeps."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from lightning_megatron.strategy.logs.joined import Joined, NotJoinable, Unforeseen
from tests.harness import run_trainers
from tests.parity.scenario import compare_scenario, differences
from tests.strategy import evaluation_scenarios as evaluation

LAYOUTS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "by one": ((2, 1), {"evaluation_micro_batch_size": 1}),
    "by three": ((2, 1), {"evaluation_micro_batch_size": 3}),
    "interleaved": (
        (2, 1),
        {
            "evaluation_micro_batch_size": 2,
            "pipeline_schedule": "interleaved",
            "virtual_pipeline_parallel_size": 2,
        },
    ),
    "tensor": ((2, 1), {"evaluation_micro_batch_size": 2, "tensor_parallel_size": 2}),
}
WHOLE = ("root", "running mean", "perplexity")
QUICK = {("by three", "sum"), ("by one", "counter"), ("by three", "mapping"), ("by three", "padded later")}
ROWS = [
    pytest.param(*row, marks=[] if row in QUICK else [pytest.mark.wide])
    for row in itertools.product(LAYOUTS, evaluation.KINDS)
]


@pytest.mark.parametrize(("layout", "kind"), ROWS)
def test_evaluation_in_micro_batches_is_that_of_one_process(layout: str, kind: str) -> None:
    (plain,) = run_trainers(evaluation.evaluate, None, {}, kind, devices=1)
    sizes, arguments = LAYOUTS[layout]
    devices = sizes[0] * sizes[1] * arguments.get("tensor_parallel_size", 1)
    for outcome in run_trainers(evaluation.evaluate, sizes, arguments, kind, devices=devices):
        assert (math.ceil(8 / arguments["evaluation_micro_batch_size"]) in outcome.value["cuts"]) != (kind in WHOLE)
        for key in ("logged", "seen", "given"):
            found = list(differences("", outcome.value[key], plain.value[key], 1e-9))
            assert not found, f"rank {outcome.rank}, {key}:\n" + "\n".join(found[:10])


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        pytest.param({"evaluation_micro_batch_size": 2}, marks=pytest.mark.wide),
        pytest.param({"pipeline_schedule": "zb-v"}, marks=pytest.mark.wide),
    ],
)
def test_a_step_of_evaluation_may_leave_the_layers_out(arguments: dict[str, Any]) -> None:
    compare_scenario(evaluation.baseline, (2, 1), **arguments)


SIZES = {"sizes": [2.0, 1.0]}


def test_a_sum_is_told_from_a_mean_and_joined() -> None:
    joined = Joined()
    joined.learn([{"n": 3, "loss": 1.0}, {"n": 2, "loss": 4.0}], {"n": 5, "loss": 2.0}, SIZES, 1e-9)
    assert joined.join([{"n": 4, "loss": 3.0}, {"n": 4, "loss": 0.0}], SIZES) == {"n": 8, "loss": 2.0}


def test_numbers_that_were_the_same_in_all_parts_are_unforeseen_where_they_differ() -> None:
    joined = Joined()
    joined.learn([0.0, 0.0], 0.0, SIZES, 1e-9)
    assert joined.join([0.0, 0.0], SIZES) == 0.0
    with pytest.raises(Unforeseen):
        joined.join([2.0, 2.0], SIZES)
    joined.learn([2.0, 3.0], 5.0, SIZES, 1e-9)
    assert joined.join([2.0, 2.0], SIZES) == 4.0


def test_a_value_that_only_the_whole_batch_has_is_named() -> None:
    with pytest.raises(NotJoinable, match=r"the result's \['root'\]"):
        Joined().learn([{"output": {"root": 1.0}}] * 2, {"output": {"root": 2.5}}, SIZES, 1e-9)


def test_a_sum_that_is_also_the_largest_part_stays_open() -> None:
    joined = Joined()
    joined.learn([0, 3], 3, SIZES, 1e-9)
    assert list(joined.open())
    joined.learn([1, 3], 4, SIZES, 1e-9)
    assert not list(joined.open())


def test_rows_and_lists_with_an_entry_per_sample_are_put_behind_each_other() -> None:
    joined, rows = Joined(), torch.arange(6.0).view(3, 2)
    joined.learn([[rows[:2], ["a", "b"]], [rows[2:], ["c"]]], [rows, ["a", "b", "c"]], SIZES, 1e-9)
    given, texts = joined.join([[rows[1:], ["d", "e"]], [rows[:1], ["f"]]], SIZES)
    assert torch.equal(given, rows[[1, 2, 0]])
    assert texts == ["d", "e", "f"]
