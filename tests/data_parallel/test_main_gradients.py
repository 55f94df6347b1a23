"""Weight gradients of linears that this package multiplies add up in float32 from products that were never rounded."""

from __future__ import annotations

from typing import Any

import pytest

from tests.data_parallel.main_gradient_scenarios import products
from tests.harness import run_trainers

SPLIT = {"pipeline_schedule": "zb-h1"}
ROWS: list[tuple[tuple[int, int, int], str, dict[str, Any], int, bool]] = [
    ((2, 1, 1), "bf16-true", SPLIT, 1, True),
    ((1, 2, 2), "bf16-mixed", {"sequence_parallel": True}, 2, True),
    ((1, 1, 2), "bf16-true", {}, 2, False),
    ((1, 2, 2), "bf16-true", {"optimizer_sharding": False}, 1, False),
    ((2, 2, 1), "bf16-mixed", SPLIT, 1, False),
    ((2, 1, 2), "bf16-mixed", {**SPLIT, "sequence_parallel": True}, 1, False),
    ((2, 1, 2), "bf16-true", {"activation_recompute": "full"}, 1, False),
    ((2, 1, 2), "bf16-mixed", {"pipeline_schedule": "interleaved"}, 2, False),
    ((2, 2, 1), "bf16-true", {"pipeline_schedule": "zb-v", "activation_recompute": "full"}, 2, False),
]


@pytest.mark.parametrize(
    ("sizes", "precision", "options", "accumulate"),
    [pytest.param(*row[:-1], marks=[] if row[-1] else [pytest.mark.wide]) for row in ROWS],
)
def test_main_gradients_are_sums_of_float32_products(
    sizes: tuple[int, int, int], precision: str, options: dict[str, Any], accumulate: int
) -> None:
    devices = sizes[0] * sizes[1] * sizes[2]
    for outcome in run_trainers(products, sizes, precision, options, accumulate, devices=devices):
        assert len(outcome.value) == 16 // sizes[0]
        for parameter, (found, rounded) in outcome.value.items():
            assert found < 1e-5 < 1e-4 < rounded, parameter
