"""Recomputation replays dropout, that of tensor ranks too, in models from elsewhere and under every backward."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_trainers
from tests.harness.remember import remembered
from tests.pipeline.recompute_scenarios import with_dropout

ROWS: list[Any] = [
    ("gpt2", 2, "zb-v", "full"),
    pytest.param("llama", 2, "interleaved", {"every": 2}, marks=pytest.mark.wide),
    *(
        pytest.param(name, tensor, schedule, recompute, marks=pytest.mark.wide)
        for name in ("gpt2", "llama")
        for tensor in (1, 2)
        for schedule, recompute in (
            ("1f1b", "full"),
            ("zb-h1", "selective"),
            ("zb-v", ["*.mlp"]),
            ("dualpipe-v", "selective"),
            ("zb-h2", "full"),
        )
    ),
]


@remembered
def kept(name: str, tensor: int) -> dict[str, float]:
    """The losses when nothing is recomputed."""
    arguments = {"tensor_parallel_size": tensor, "pipeline_schedule": "1f1b"}
    found: dict[str, float] = run_trainers(with_dropout, name, arguments, devices=2 * tensor)[0].value
    return found


@pytest.mark.wide
@pytest.mark.parametrize(("name", "tensor", "schedule", "recompute"), ROWS)
def test_recomputed_dropout_draws_what_it_drew(name: str, tensor: int, schedule: str, recompute: Any) -> None:
    arguments = {"tensor_parallel_size": tensor, "pipeline_schedule": schedule, "activation_recompute": recompute}
    for outcome in run_trainers(with_dropout, name, arguments, devices=2 * tensor):
        assert outcome.value == pytest.approx(kept(name, tensor), abs=1e-6), "norms and losses are in float32"
