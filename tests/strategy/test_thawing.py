"""A run that unfreezes layers goes on after that as it does in one process, with the same parameter groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness import run_trainers
from tests.strategy.thawing_scenarios import by_step, thawed

WIDE = pytest.mark.wide
ROWS = [
    pytest.param(2, (2, 1, 1), 1),
    pytest.param(None, (2, 1, 1), 0, marks=WIDE),
    pytest.param(None, (2, 1, 2), 2, marks=WIDE),
    pytest.param(4, (2, 2, 1), 1, marks=WIDE),
    pytest.param(4, (4, 1, 1), 2, marks=WIDE),
    pytest.param(0, (2, 1, 1), 1, marks=WIDE),
    pytest.param(0, (2, 2, 1), 1, marks=WIDE),
    pytest.param(2, (1, 1, 2), 1, marks=WIDE),
    pytest.param(2, (1, 1, 1), 1, marks=WIDE),
]


@pytest.mark.parametrize(("layers", "sizes", "stop"), ROWS)
def test_unfrozen_layers_go_on_in_their_own_group(
    layers: int | None, sizes: tuple[int, int, int], stop: int, tmp_path: Path
) -> None:
    for goes_on in (False, True):
        plain, ours = str(tmp_path / "plain.ckpt"), str(tmp_path / "ours.ckpt")
        epochs, rates, weights = run_trainers(thawed, layers, None, stop, plain, goes_on, devices=1)[0].value
        devices = sizes[0] * sizes[1] * sizes[2]
        first, *others = [o.value for o in run_trainers(thawed, layers, sizes, stop, ours, goes_on, devices=devices)]
        assert first[1] == rates
        for found, _, _ in (first, *others):
            assert found == pytest.approx(epochs, rel=1e-9)
        for name, value in weights.items():
            torch.testing.assert_close(first[2][name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "freezes"),
    [
        ("interleaved", False),
        pytest.param("interleaved", True, marks=WIDE),
        pytest.param("zb-v", False, marks=WIDE),
        pytest.param("dualpipe-v", True, marks=WIDE),
        pytest.param("1f1b", True, marks=WIDE),
    ],
)
def test_layers_that_are_frozen_or_not_from_batch_to_batch_train_as_in_one_process(
    schedule: str, freezes: bool
) -> None:
    expected = run_trainers(by_step, "", freezes, devices=1)[0].value
    found = run_trainers(by_step, schedule, freezes, devices=2)[0].value
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-9)
