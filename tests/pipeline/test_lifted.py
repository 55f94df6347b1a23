"""What the user has compiled is compiled layer by layer under a pipeline, with the numbers of one process."""

from __future__ import annotations

import pytest

from tests.harness import run_trainers
from tests.harness.remember import remembered
from tests.parity.scenario import differences
from tests.pipeline import lifted_scenarios as lifted

WIDE = pytest.mark.wide


@remembered
def _one_process(name: str) -> tuple[list[float], bool]:
    value: tuple[list[float], bool] = run_trainers(lifted.fit, None, {}, name, devices=1)[0].value
    return value


@pytest.mark.parametrize(
    "name",
    [
        "wrapped",
        pytest.param("wrapped_body", marks=WIDE),
        pytest.param("in_place", marks=WIDE),
        pytest.param("parts", marks=WIDE),
        pytest.param("layers_in_place", marks=WIDE),
    ],
)
def test_a_compiled_module_is_cut_and_its_layers_are_compiled(name: str) -> None:
    expected, _ = _one_process(name)
    for outcome in run_trainers(lifted.fit, (2, 1), {}, name, devices=2):
        found, compiled = outcome.value
        assert not list(differences("", found, expected, 1e-9))
        assert compiled


def test_scripted_layers_are_refused_on_every_rank() -> None:
    for outcome in run_trainers(lifted.fit, (2, 1), {}, "scripted", devices=2, check=False, grace=20.0):
        said = f"{outcome.error}\n{outcome.output}"
        assert "is a TorchScript module" in said and "`MegatronStrategy(compile_layers=True)`" in said, said


@pytest.mark.wide
def test_a_compiled_lightning_module_is_refused_by_lightning() -> None:
    for outcome in run_trainers(lifted.fit, (2, 1), {}, "whole", devices=2, check=False, grace=20.0):
        assert "Using a compiled model is incompatible with the current strategy: `MegatronStrategy`" in outcome.error
