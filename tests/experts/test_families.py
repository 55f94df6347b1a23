"""Every family of mixtures trains as in one process with its experts shared out, with and without a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.experts.expert_scenarios import fit
from tests.experts.families import FAMILIES, FURTHER, IN_FLOAT32
from tests.harness import one_process, run_trainers

SCHEDULES = ("1f1b", "interleaved", "zb-v")
ALL = (*FAMILIES, *FURTHER)
STRICT = 1e-9
ROUNDED = (*IN_FLOAT32, "Jamba")  # its scans, of fewer samples on each of four replicas
NEAR = 1e-6
"""Norms, softmax and scans in Hugging Face's code compute in float32, and round otherwise where a sum does.

With `torch.float64` in its place in that code, layouts like these agree to 1e-14. Experts move by 1e-3 and more.
"""


def _rows() -> list[tuple[str, int, dict[str, Any], dict[str, Any]]]:
    """Each family under one schedule, its experts over two ranks, or (every fifth) over four that split layers as well,
    and every other one in one grid without a pipeline; schedules and the other options take turns.
    """
    rows: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = []
    for number, family in enumerate(ALL):
        tensor = 1 if number % 5 else 2
        options: dict[str, Any] = {"expert_parallel_size": 2 * tensor, "pipeline_parallel_size": 2}
        options |= {"micro_batch_size": 2} | ({"tensor_parallel_size": tensor} if tensor > 1 else {})
        options |= {"pipeline_schedule": SCHEDULES[number % 3], "optimizer_sharding": number % 2 == 0}
        rows.append((f"deep_{family}", 4 * tensor, options, {"gradient_clip_val": (0.5, None)[number // 2 % 2]}))
        further = ({}, {"tensor_parallel_size": 2}, {"optimizer_sharding": False})[number % 3]
        trainer = {"gradient_clip_val": None, "limit_val_batches": 0}  # the others evaluate
        if number % 2 == 0:
            rows.append((f"large_{family}", 4, {"expert_parallel_size": 4, **further}, trainer))
    return rows


@pytest.mark.wide
@pytest.mark.parametrize(("family", "devices", "options", "trainer"), _rows(), ids=str)
def test_training_with_experts_shared_out_is_that_of_one_process(family, devices, options, trainer):
    expected = one_process(fit, family, None, trainer)
    found = [each.value for each in run_trainers(fit, family, options, trainer, devices=devices)]
    near = NEAR if "tensor_parallel_size" in options or family.split("_", 1)[1] in ROUNDED else STRICT
    for value in found:
        assert value["losses"] == pytest.approx(expected["losses"], rel=near)
    torch.testing.assert_close(found[0]["weights"], expected["weights"], rtol=near, atol=near)
