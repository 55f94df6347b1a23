"""A Trainer whose module or plan cannot be split says so on every rank, with what to change."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.harness import run_trainers
from tests.strategy.start_scenarios import fit_with


@pytest.mark.parametrize(
    ("kind", "arguments", "patterns"),
    [
        ("gpt", {"tensor_parallel_size": 4}, ["attention heads of 'net.transformer.h.0.attn' is 2", "size 4; use"]),
        (
            "llama",
            {"tensor_parallel_size": 2, "tensor_parallel_plan": {"layers.*.mlp.up_prj": "colwise"}},
            ["layers.*.mlp.up_prj' matches no module", "did you mean 'net.model.layers.*.mlp.up_proj'"],
        ),
        (
            "llama",
            {"tensor_parallel_size": 2, "tensor_parallel_plan": {"layers.*.mlp.up_proj": "colwise"}},
            ["up_proj' (colwise) but gives no row-parallel layer", "'colwise_gather_output'"],
        ),
        (
            "llama",
            {"tensor_parallel_size": 2, "tensor_parallel_plan": {"layers.*.mlp": "rowwise"}},
            ["is a LlamaMLP and cannot be 'rowwise'", "needs a linear layer; it holds"],
        ),
        ("gpt", {"tensor_parallel_size": 2, "tensor_parallel_plan": "all"}, ["`tensor_parallel_plan='all'`", "'auto'"]),
        ("gpt", {"tensor_parallel_size": 2, "tensor_parallel_plan": {}}, ["`tensor_parallel_plan={}`", "not empty"]),
        ("gpt", {"tensor_parallel_size": 1, "sequence_parallel": True}, ["`sequence_parallel=True` needs"]),
    ],
)
def test_what_cannot_be_split_is_refused_on_every_rank(
    kind: str, arguments: dict[str, Any], patterns: list[str]
) -> None:
    ranks = max(2, arguments["tensor_parallel_size"])
    for outcome in run_trainers(fit_with, kind, arguments, devices=ranks, check=False, grace=20, deadline=60):
        assert outcome.error is not None and outcome.error.startswith("ValueError"), outcome.error
        for pattern in patterns:
            assert re.search(re.escape(pattern), outcome.error), f"no {pattern!r} in {outcome.error}"


def test_a_call_that_the_plan_was_not_tried_with_is_named_beside_the_error_it_ends_in() -> None:
    arguments = {"tensor_parallel_size": 2}
    for outcome in run_trainers(fit_with, "fixed_length", arguments, devices=2, check=False, grace=20, deadline=60):
        assert outcome.error is not None
        assert "'net.layers.0.attn' is split over the tensor-parallel ranks by a plan" in outcome.trace
        assert "a call without argument 2" in outcome.trace and "`example_input_array`" in outcome.trace
