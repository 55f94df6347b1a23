"""Sixteen bits in the layers, thirty-two in the optimizer; what is not finite; and how many bytes that takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.data_parallel.update.loss_scale import LossScale
from tests.data_parallel.precision_scenarios import burst, bytes_held, eight_bits, losses
from tests.harness import JobFailed, one_process, run_trainers

LAYOUTS: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((1, 1, 1), {}),
    ((1, 2, 1), {}),
    ((2, 2, 1), {"micro_batch_size": 3}),
    ((1, 2, 2), {}),
    ((2, 1, 1), {"micro_batch_size": 3, "pipeline_schedule": "zb-h1"}),
    ((1, 2, 1), {"gradient_reduce_dtype": torch.bfloat16, "optimizer_sharding": False}),
]


CHOSEN = [((1, 2, 1), False), ((2, 2, 1), True)]
"""Where overflows are tried in an ordinary test run."""


def _mean(values: list[list[float]]) -> torch.Tensor:
    return torch.tensor(values).mean(0)


def _rows() -> list[Any]:
    """Every layout in one of the precisions, the rest on request."""
    rows = []
    for index, (sizes, options) in enumerate(LAYOUTS):
        for other, precision in enumerate(("bf16-mixed", "16-mixed")):
            marks = [pytest.mark.wide] if (index + other) % 2 else []
            rows.append(pytest.param(precision, sizes, options, marks=marks))
    return rows


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("precision", "sizes", "options"), _rows())
def test_mixed_precision_follows_the_float32_run(
    precision: str, sizes: tuple[int, int, int], options: dict[str, Any]
) -> None:
    devices = sizes[0] * sizes[1] * sizes[2]
    wanted = one_process(losses, None, "32-true", {})["losses"]
    values = [outcome.value for outcome in run_trainers(losses, sizes, precision, options, devices=devices)]
    found = _mean([value["losses"] for value in values])
    noise = 1e-2 if precision == "bf16-mixed" else 2e-3  # bfloat16 has 8 significant bits, float16 11
    assert float((found - torch.tensor(wanted)).abs().max()) < noise
    assert found[-4:].mean() < found[:4].mean()
    low = "torch.bfloat16" if precision == "bf16-mixed" else "torch.float16"
    for value in values:
        assert value["layers"] == {low, "torch.float32"} and value["state"] == {"torch.float32"}
        assert value["norms"] <= {"torch.float32"}


@pytest.mark.parametrize(
    ("sizes", "sharding"),
    [
        pytest.param(sizes, sharding, marks=[] if (sizes, sharding) in CHOSEN else [pytest.mark.wide])
        for sizes in ((1, 2, 1), (2, 2, 1), (1, 3, 1), (3, 2, 1), (4, 1, 1))
        for sharding in (True, False)
    ],
)
def test_an_overflow_skips_the_step_on_every_rank(sizes: tuple[int, int, int], sharding: bool) -> None:
    options = {"optimizer_sharding": sharding}
    for outcome in run_trainers(burst, sizes, "16-mixed", options, 1e30, devices=sizes[0] * sizes[1]):
        value = outcome.value
        assert value["moved"] == [True, True, False, True] and value["finite"]
        assert value["skipped"] == 1 and value["scale"]["scale"] == 2.0**15 and value["scale"]["good_steps"] == 1


def test_a_run_goes_on_at_the_loss_scale_of_its_checkpoint(tmp_path: Path) -> None:
    path = str(tmp_path / "scaled.ckpt")
    for resumed, expected in ((False, 2.0**15), (True, 2.0**14)):  # each of the two epochs overflows once
        for outcome in run_trainers(burst, (1, 2, 1), "16-mixed", {}, 1e30, path, resumed, devices=2):
            assert outcome.value["scale"]["scale"] == expected


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 1), (2, 2, 1)])
def test_a_loss_that_is_not_finite_is_skipped_on_request(sizes: tuple[int, int, int]) -> None:
    options = {"nonfinite": "skip"}
    for outcome in run_trainers(burst, sizes, "64-true", options, float("nan"), devices=sizes[0] * sizes[1]):
        value = outcome.value
        assert value["moved"] == [True, True, False, True] and value["finite"] and value["skipped"] == 1


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 2, 1)])
def test_a_loss_that_is_not_finite_is_named_on_every_rank(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(JobFailed) as failure:
        run_trainers(burst, sizes, "64-true", {"nonfinite": "raise"}, float("inf"), devices=sizes[0] * sizes[1])
    for outcome in failure.value.outcomes:
        assert (outcome.error or "").strip().startswith("NonFiniteError")
        assert "data 1" in outcome.error and "step 2" in outcome.error and "micro-batch 2" in outcome.error
        assert "No rank has updated its weights" in outcome.error


def test_the_scale_grows_backs_off_and_waits_as_it_is_told() -> None:
    scale = LossScale(8.0, growth_interval=2, hysteresis=2)
    for overflowed, expected in [(False, 8), (False, 16), (True, 16), (True, 8), (True, 8), (False, 8), (True, 8)]:
        scale.update(overflowed)
        assert scale.scale == expected
    other = LossScale()
    other.load_state_dict(scale.state_dict())
    assert other == scale


FORMULAS = {"32-true": (4, 4, 8), "64-true": (8, 8, 16), "bf16-mixed": (2, 4, 12), "bf16-true": (2, 4, 4)}


@pytest.mark.parametrize(
    ("precision", "replicas", "accumulate"),
    [
        pytest.param(precision, replicas, accumulate, marks=[] if chosen else [pytest.mark.wide])
        for precision in FORMULAS
        for replicas, accumulate, chosen in (
            (2, 1, "mixed" not in precision),
            (2, 2, "mixed" in precision),
            (4, 1, "mixed" in precision),
            (4, 2, False),
        )
    ],
)
def test_bytes_of_a_rank_are_those_of_the_formula(precision: str, replicas: int, accumulate: int) -> None:
    weights, gradients, optimizer = FORMULAS[precision]
    kept = gradients if accumulate > 1 else gradients / replicas  # a single backward lets go of what it has sent
    for outcome in run_trainers(bytes_held, (1, replicas, 1), precision, {}, accumulate, devices=replicas):
        value = outcome.value
        expected = value["parameters"] * (weights + kept + optimizer / replicas)
        assert value["bytes"] == pytest.approx(expected, rel=0.02)


def _eight(precision: str, sizes: dict[str, Any]) -> list[dict[str, Any]]:
    devices = 1
    for size in sizes.values():
        devices *= size if isinstance(size, int) and not isinstance(size, bool) else 1
    return [outcome.value for outcome in run_trainers(eight_bits, precision, sizes, devices=devices)]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("sizes", "linears"),
    [
        pytest.param({}, 14, marks=pytest.mark.wide),
        pytest.param({"tensor_parallel_size": 2}, 14),
        pytest.param({"tensor_parallel_size": 2, "sequence_parallel": True}, 14, marks=pytest.mark.wide),
        pytest.param({"activation_recompute": "full"}, 14, marks=pytest.mark.wide),
        pytest.param({"pipeline_parallel_size": 2, "pipeline_schedule": "zb-h1"}, 7),
    ],
)
def test_products_of_eight_bits_follow_those_of_sixteen(sizes: dict[str, Any], linears: int) -> None:
    sixteen, eight = _eight("bf16-mixed", sizes), _eight("fp8-mixed", sizes)
    for value, other in zip(eight, sixteen, strict=True):
        assert value["eight"] == linears and other["eight"] == 0
        found, wanted = torch.tensor(value["losses"]), torch.tensor(other["losses"])
        assert wanted[-1] < 0.7 * wanted[0] and found[-1] < 0.7 * found[0]
        assert 0 < float((found - wanted).abs().max()) < 0.1  # about 4 in the beginning


def test_eight_bits_are_refused_before_a_step_where_the_device_lacks_them() -> None:
    with pytest.raises(JobFailed) as failure:
        run_trainers(eight_bits, "fp8-mixed", {"tensor_parallel_size": 2}, False, devices=2)
    for outcome in failure.value.outcomes:
        assert "`precision='fp8-mixed'` needs an NVIDIA GPU" in (outcome.error or "")
        assert "use `precision='bf16-mixed'`" in outcome.error
