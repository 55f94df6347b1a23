"""A Trainer whose module or plan cannot be split says so on every rank, with what to change."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron.parallelize import parallelize
from tests.generation.own_caches import HEADS, Allocated, Allocates
from tests.harness import run_ranks, run_trainers
from tests.parallelize.models import Block, CausalSelfAttention
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
        (
            "gpt",
            {"tensor_parallel_size": 2, "tensor_parallel_plan": {}},
            ["`tensor_parallel_plan={}`", "a non-empty dict"],
        ),
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


@run_ranks(tensor=2)
def test_a_cache_made_for_all_heads_is_named_beside_the_error_it_ends_in(mesh: Any) -> None:
    module, cache = Allocates().double(), Allocated()
    parallelize(module, mesh)
    cache.keys[0] = cache.values[0] = torch.zeros(2, HEADS, 8, 4).double()
    with pytest.raises(RuntimeError) as raised:
        module(torch.ones(2, 3, dtype=torch.long), cache)
    (note,) = raised.value.__notes__
    assert "there are 2 of its 4 heads, and what argument 1 (Allocated) holds may be for all" in note


@run_ranks(tensor=2)
def test_ranks_that_would_split_differently_are_told_so(mesh: Any) -> None:
    module = nn.Sequential(*(Block(16, 4, CausalSelfAttention) for _ in range(2)))
    if dist.get_rank() == 1:
        module[1].mlp = nn.Identity()
    with pytest.raises(ValueError, match=r"ranks 0 and 1 would split the module differently: `1\.\S+` is"):
        parallelize(module, mesh, example=torch.ones(1, 2, 16), synchronize=False)
