"""Averaging callbacks give one process's averages at every layout, and go on from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness import one_process, run_trainers
from tests.strategy.averaging_scenarios import KINDS, STOP, Counted, Swapped, averaged, counted

WIDE = pytest.mark.wide
LAYOUTS = {"one": (1, 1, 1), "pp2": (2, 1, 1), "dp2": (1, 2, 1), "tp2": (1, 1, 2), "pp2tp2": (2, 1, 2)}
EVERYDAY = [("ema", "tp2"), ("swa", "dp2"), ("mean", "one"), ("own", "pp2")]
ROWS = [
    pytest.param(kind, layout, marks=() if (kind, layout) in EVERYDAY else WIDE) for kind in KINDS for layout in LAYOUTS
]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("kind", "layout"), ROWS)
def test_averages_are_those_of_one_process_and_go_on(kind: str, layout: str, tmp_path: Path) -> None:
    sizes, path = LAYOUTS[layout], str(tmp_path / "run.ckpt")
    devices = sizes[0] * sizes[1] * sizes[2]
    notes, weights = one_process(averaged, kind, None)
    found, state = run_trainers(averaged, kind, sizes, path, devices=devices)[0].value
    again, resumed = run_trainers(averaged, kind, sizes, None, path, devices=devices)[0].value
    assert found == pytest.approx(notes, rel=1e-9)
    assert again[-len(notes[2 * STOP :]) :] == pytest.approx(notes[2 * STOP :], rel=1e-9)
    assert set(state) == set(weights) == set(resumed)
    for name, value in weights.items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(resumed[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layout", ["pp2", pytest.param("tp2", marks=WIDE)])
@pytest.mark.parametrize("kind", [Counted, Swapped])
def test_methods_that_a_subclass_overrides_are_called_as_in_one_process(
    kind: type[Counted | Swapped], layout: str
) -> None:
    calls, weights = one_process(counted, kind, None)
    outcomes = run_trainers(counted, kind, LAYOUTS[layout], devices=2)
    assert [outcome.value[0] for outcome in outcomes] == [calls, calls]
    assert set(calls) == ({"setup", "update", "transfer"} if kind is Counted else {"setup", "swap", "copy"})
    for name, value in weights.items():
        torch.testing.assert_close(outcomes[0].value[1][name], value, rtol=1e-9, atol=1e-12)


def test_an_average_saved_by_one_layout_goes_on_at_another(tmp_path: Path) -> None:
    path = str(tmp_path / "run.ckpt")
    notes, weights = run_trainers(averaged, "ema", (2, 1, 1), path, devices=2)[0].value
    again, resumed = run_trainers(averaged, "ema", (1, 1, 2), None, path, devices=2)[0].value
    assert again[-len(notes[2 * STOP :]) :] == pytest.approx(notes[2 * STOP :], rel=1e-9)
    for name, value in weights.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("layout", "micro"), [("dp2", "auto"), *(pytest.param(x, 2, marks=WIDE) for x in ("one", "dp2"))]
)
def test_swa_measures_batch_norm_again_without_a_pipeline(layout: str, micro: int | str) -> None:
    sizes = LAYOUTS[layout]
    notes, weights = one_process(averaged, "swa", None, None, None, True)
    found, state = run_trainers(averaged, "swa", sizes, None, None, True, "64-true", micro, devices=sizes[1])[0].value
    assert found == pytest.approx(notes, rel=1e-9)
    for name, value in weights.items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def test_sixteen_bit_layers_are_averaged_in_float32() -> None:
    notes, weights = run_trainers(averaged, "ema", (1, 1, 1), None, None, False, "bf16-mixed", devices=1)[0].value
    assert {value.dtype for value in weights.values()} == {torch.float32}
    plain = run_trainers(averaged, "ema", None, None, None, False, "32-true", devices=1)[0].value[0]
    assert notes[::2] == pytest.approx(plain[::2], rel=3e-2)
