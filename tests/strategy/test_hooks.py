"""Hooks that reach into single layers do on every rank what they do on one process, or say why they cannot."""

from __future__ import annotations

import pytest

from tests.harness import one_process, run_trainers
from tests.parity.row import LAYOUTS
from tests.parity.scenario import compare_scenario, differences
from tests.strategy import hook_scenarios as hooks


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


@pytest.mark.parametrize("layout", [(1, 2), pytest.param((1, 4), marks=pytest.mark.wide)], ids=["dp2", "dp4"])
def test_gradients_are_there_behind_the_update_where_a_hook_reads_them(layout: tuple[int, int]) -> None:
    reference = one_process(hooks.read_late, None, {})
    assert len(reference) == 3 and min(reference.values()) > 0
    for outcome in run_trainers(hooks.read_late, layout, {}, devices=layout[1]):
        assert not list(differences("", outcome.value, reference, 1e-9)), outcome.rank


@pytest.mark.wide
@pytest.mark.parametrize("layout", ["pp3", "pp2xdp2", "tp2", "pp2xtp2"])
@pytest.mark.parametrize("kind", ["all", "those of the network", "layers", "each layer", "each"])
def test_gradients_clipped_by_hand_are_those_of_one_process(kind: str, layout: str) -> None:
    pipeline, data, tensor = LAYOUTS[layout]
    reference = one_process(hooks.clipped, None, {}, kind)
    arguments = {"tensor_parallel_size": tensor}
    devices = pipeline * data * tensor
    for outcome in run_trainers(hooks.clipped, (pipeline, data), arguments, kind, devices=devices):
        assert not list(differences("", outcome.value, reference, 1e-9)), outcome.rank
