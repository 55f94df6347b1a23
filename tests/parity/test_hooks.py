"""Hooks that reach into single layers do on every rank what they do on one process, or say why they cannot."""

from __future__ import annotations

import pytest

from tests.harness import run_trainers
from tests.parity import hook_scenarios as hooks
from tests.parity.scenario import compare_scenario


@pytest.mark.parametrize("layout", [(2, 1), pytest.param((3, 1), marks=pytest.mark.wide)], ids=["pp2", "pp3"])
def test_hooks_write_and_log_weights_of_any_stage(layout: tuple[int, int]) -> None:
    compare_scenario(hooks.tended, layout)


@pytest.mark.wide
def test_hooks_write_and_log_weights_of_stages_with_two_pieces() -> None:
    compare_scenario(hooks.tended, (2, 1), pipeline_schedule="zb-v")


@pytest.mark.wide
@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("number", "was read by `__float__`"),
        ("copy", "was written into another tensor by `copy_`"),
        ("sum", "no stage can compute it"),
    ],
)
def test_weights_of_another_stage_are_no_zeros(kind: str, complaint: str) -> None:
    for outcome in run_trainers(hooks.read, (2, 1), {}, kind, devices=2, check=False, grace=20.0):
        said = f"{outcome.error}{outcome.trace}{outcome.output}"
        assert complaint in said and "`pipeline_parallel_size=1`" in said, said
