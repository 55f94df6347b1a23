"""Hooks that go over all parameters do under a pipeline what they do in one process, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_trainers
from tests.parity.scenario import Layout, differences
from tests.strategy import over_stages_scenarios as over

LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "pp2": ((2, 1), {}),
    "pp3": ((3, 1), {}),
    "zb-v": ((2, 1), {"pipeline_schedule": "zb-v"}),
    "tp2xpp2": ((2, 1), {"tensor_parallel_size": 2}),
    "dp2xpp2": ((2, 2), {}),
}
KINDS = (
    "Over",
    "Followed",
    "FollowedInStep",
    "AveragedFlat",
    "AveragedByPlace",
    "AveragedLater",
    "AveragedState",
    "Scaled",
    "Auto",
    "Skipping",
    "Noisy",
    "Groups",
    "Counting",
    "Totals",
    "Clipped",
    "ClippedBeside",
    "PulledByAll",
    "RateByHand",
)
QUICK = {
    ("pp2", "Auto"),
    ("pp2", "Followed"),
    ("pp2", "FollowedInStep"),
    ("pp2", "AveragedFlat"),
    ("pp2", "AveragedLater"),
    ("pp2", "AveragedState"),
    ("pp2", "Noisy"),
    ("pp2", "Groups"),
    ("pp2", "Totals"),
    ("pp2", "Clipped"),
    ("pp2", "ClippedBeside"),
    ("tp2xpp2", "Scaled"),
}


REFUSED = {("tp2xpp2", "Followed"), ("tp2xpp2", "FollowedInStep")}  # pairs of which one is split, the other elsewhere


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(layout, kind, marks=() if (layout, kind) in QUICK else pytest.mark.wide)
        for layout in LAYOUTS
        for kind in KINDS
        if (layout, kind) not in REFUSED
    ],
)
def test_hooks_over_all_parameters_are_those_of_one_process(layout: str, kind: str) -> None:
    reference = run_trainers(over.run, None, {}, kind, devices=1)[0].value
    shape, arguments = LAYOUTS[layout]
    devices = shape[0] * shape[1] * arguments.get("tensor_parallel_size", 1)
    for outcome in run_trainers(over.run, shape, arguments, kind, devices=devices):
        wanted = {name: value for name, value in reference.items() if name in outcome.value or outcome.rank == 0}
        assert not list(differences("", outcome.value, wanted, 1e-9)), outcome.rank


@pytest.mark.wide
@pytest.mark.parametrize(("layout", "kind"), sorted(REFUSED))
def test_a_copy_that_trains_is_not_paired_where_its_source_is_split_and_elsewhere(layout: str, kind: str) -> None:
    shape, arguments = LAYOUTS[layout]
    for outcome in run_trainers(over.run, shape, arguments, kind, devices=4, check=False, grace=20.0):
        said = f"{outcome.error}{outcome.trace}{outcome.output}"
        assert "does other things on other pipeline" in said and "requires_grad_(False)" in said, said


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("OnOneRank", "`on_before_optimizer_step` goes over all parameters, and does other things on other pipeline"),
        pytest.param("Large", "brings together, by `cat`, tensors of more than 65536 elements", marks=pytest.mark.wide),
    ],
)
def test_hooks_that_differ_between_stages_or_join_large_tensors_are_refused(kind: str, complaint: str) -> None:
    for outcome in run_trainers(over.run, (2, 1), {}, kind, devices=2, check=False, grace=20.0):
        said = f"{outcome.error}{outcome.trace}{outcome.output}"
        assert complaint in said and "over_stages_scenarios.py" in said and "killed" not in str(outcome.error), said


def test_a_norm_of_another_stages_layer_is_no_zero_in_a_step_by_hand() -> None:
    for outcome in run_trainers(over.run, (2, 1), {}, "ClippedInStep", devices=2, check=False, grace=20.0):
        said = f"{outcome.error}{outcome.trace}{outcome.output}"
        assert "the logged value `norm` depends on `net.blocks.0`, which another pipeline stage owns" in said, said


def test_a_number_that_ranks_do_not_have_alike_is_told_of_unless_each_has_measured_it() -> None:
    run_trainers(over.run, (2, 1), {}, "LogsSeconds", devices=2)
    for outcome in run_trainers(over.run, (2, 1), {}, "LogsByPairs", devices=2, check=False, grace=20.0):
        said = f"{outcome.error}{outcome.output}"
        assert "`averages`, logged in `on_train_epoch_end`, differs between the ranks" in said or outcome.rank, said


@pytest.mark.parametrize("kind", ["Pulled", pytest.param("PulledAfterwards", marks=pytest.mark.wide)])
def test_what_a_hook_has_kept_of_its_stage_alone_is_told_where_another_stages_is_looked_up(kind: str) -> None:
    outcomes = run_trainers(over.run, (2, 1), {}, kind, devices=2, check=False, grace=20.0)
    said = "".join(f"{outcome.error}{outcome.trace}" for outcome in outcomes)
    assert "is on another pipeline stage than this code runs on" in said and "killed" not in said, said
