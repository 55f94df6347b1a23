"""Backwards in the middle of a step run in the precision around it."""

from __future__ import annotations

import contextlib

import pytest
import torch

from lightning_megatron.mesh.precisions import RunningPrecision, StepPrecision


@contextlib.contextmanager
def default(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


INSIDE = {
    "64-true": lambda: default(torch.float64),
    "bf16-mixed": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", ["64-true", "bf16-mixed"])
def test_a_backward_runs_in_what_is_around_the_step(kind):
    around, precision = RunningPrecision.now(), StepPrecision()
    with precision.step(), INSIDE[kind]():
        inside = RunningPrecision.now()
        assert inside != around
        with precision.backward():
            assert RunningPrecision.now() == around
            with precision.elsewhere():
                assert RunningPrecision.now() == inside
                with precision.backward():
                    assert RunningPrecision.now() == around
                assert RunningPrecision.now() == inside
            assert RunningPrecision.now() == around
        assert RunningPrecision.now() == inside
        with precision.elsewhere():
            assert RunningPrecision.now() == inside
    assert RunningPrecision.now() == around


def test_autocast_around_the_step_stays_on_in_its_backward():
    precision = StepPrecision()
    with torch.autocast("cpu", dtype=torch.bfloat16), precision.step(), torch.autocast("cpu", dtype=torch.float16):
        with precision.backward():
            assert torch.get_autocast_dtype("cpu") == torch.bfloat16
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        assert torch.get_autocast_dtype("cpu") == torch.float16


def test_outside_of_steps_nothing_changes():
    precision = StepPrecision()
    with default(torch.float64), precision.backward():
        assert torch.get_default_dtype() == torch.float64


def test_a_backward_that_fails_leaves_the_precision_of_the_step():
    precision = StepPrecision()
    with precision.step(), default(torch.float64):
        with pytest.raises(RuntimeError, match="in a hook"), precision.backward():
            raise RuntimeError("in a hook")
        assert torch.get_default_dtype() == torch.float64
