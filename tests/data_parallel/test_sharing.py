"""Replicas that share the optimizer's work train what one process trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.data_parallel.sharing_scenarios import OPTIMIZERS, Setup, differences, norms, quiet, train
from tests.harness import JobFailed, one_process, run_trainers
from tests.parity.covering import covering_rows

SMALL = {"bucket_size_mb": 0.01}  # several buckets, whose cuts fall into the middle of parameters
CLIP = {"gradient_clip_val": 0.3}
CLIP_VALUES = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
WIDE = pytest.mark.wide


def rows(everyday: dict[str, tuple[Any, ...]], wide: dict[str, tuple[Any, ...]]) -> list[Any]:
    """Parameters by the name of their row."""
    marked = [(everyday, ()), (wide, WIDE)]
    return [pytest.param(*values, id=name, marks=marks) for named, marks in marked for name, values in named.items()]


def check(setup: Setup, tolerance: float = 1e-9) -> list[dict[str, Any]]:
    """Compares a run with a plain Trainer's."""
    wanted = one_process(train, replace(setup, layout=None, strategy={}))
    values = [outcome.value for outcome in run_trainers(train, setup, devices=setup.devices)]
    for rank, value in enumerate(values):
        if (
            setup.module.get("optimizer") == "lion"
        ):  # keys' biases have no gradient but rounding, and Lion takes its sign
            value["weights"] = {n: v for n, v in value["weights"].items() if not n.endswith("c_attn.bias")}
        found = differences(value, wanted, tolerance)
        assert not found, f"rank {rank}: " + "\n".join(found[:5])
        assert value["holds_module"]
    return values


@pytest.mark.parametrize("replicas", [pytest.param(2, marks=WIDE), 3, pytest.param(4, marks=WIDE)])
def test_shared_work_gives_the_weights_of_one_process(replicas: int) -> None:
    values = check(Setup((1, replicas, 1), SMALL, CLIP))
    whole = one_process(train, Setup((1, 1, 1)))["state_elements"]
    for value in values:
        assert value["state_elements"] < 1.15 * whole / replicas


@pytest.mark.everyday(1)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw"])
def test_any_optimizer_may_be_shared(name: str) -> None:
    # Adafactor divides gradients by their own size: those of key biases, which are zero but for rounding, become noise.
    tolerance = 1e-5 if name == "adafactor" else 1e-9
    check(Setup((1, 2, 1), SMALL, {"accumulate_grad_batches": 2}, {"optimizer": name}), tolerance)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("layout", "clip"),
    rows(
        {"pp2xdp2-norm": ((2, 2, 1), CLIP), "dp2xtp2-value": ((1, 2, 2), CLIP_VALUES)},
        wide={"pp2xdp2-value": ((2, 2, 1), CLIP_VALUES), "dp2xtp2-norm": ((1, 2, 2), CLIP)},
    ),
)
def test_shared_work_meets_stages_and_split_layers(layout: tuple[int, int, int], clip: dict[str, Any]) -> None:
    check(Setup(layout, {**SMALL, "micro_batch_size": 3}, {**clip, "accumulate_grad_batches": 2}))


LAYOUTS = ((1, 2, 1), (1, 3, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2))
COLUMNS = ((True, False), LAYOUTS, ("sgd", "adamw", "lion", "adagrad"), ({}, CLIP), (1, 2))


@WIDE  # any three of the five meet; all 160 together show nothing that three do not
@pytest.mark.parametrize(("sharding", "layout", "name", "clip", "accumulate"), covering_rows(COLUMNS, 3))
def test_shared_work_in_any_three_settings(
    sharding: bool, layout: tuple[int, int, int], name: str, clip: dict[str, Any], accumulate: int
) -> None:
    options = {**clip, "accumulate_grad_batches": accumulate}
    check(Setup(layout, {**SMALL, "optimizer_sharding": sharding}, options, {"optimizer": name}))


def test_shards_inside_a_node_and_copies_across() -> None:
    values = check(Setup((1, 4, 1), {**SMALL, "optimizer_sharding": {"shard": 2}}, CLIP))
    assert values[0]["state_elements"] == values[2]["state_elements"]


@pytest.mark.wide
def test_an_optimizer_that_is_declared_to_need_whole_parameters_gets_them() -> None:
    setup = Setup((1, 2, 1), {**SMALL, "optimizer_sharding": {"elementwise": False}}, {}, {"optimizer": "lion"})
    for value in check(setup):
        assert value["updates_matrices"]
    for outcome in run_trainers(train, replace(setup, strategy=SMALL), devices=2):
        assert not outcome.value["updates_matrices"]


@pytest.mark.everyday(1)
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_two_replicas_with_and_without_sharing_agree_bit_for_bit(name: str) -> None:
    setups = [Setup((1, 2, 1), {**SMALL, "optimizer_sharding": on}, {}, {"optimizer": name}) for on in (True, False)]
    runs = [run_trainers(train, setup, devices=2)[0].value for setup in setups]
    assert runs[0]["losses"] == runs[1]["losses"]
    for name, value in runs[0]["weights"].items():
        assert torch.equal(value, runs[1]["weights"][name]), name


@pytest.mark.wide
@pytest.mark.parametrize("layout", [pytest.param((1, 2, 1), marks=WIDE), (2, 2, 1)], ids=["dp2", "pp2xdp2"])
def test_parameters_without_a_gradient_are_left_alone(layout: tuple[int, int, int]) -> None:
    check(Setup(layout, SMALL, {}, {"unused": True}))


@WIDE
@pytest.mark.parametrize("layout", [(2, 1, 1), (3, 2, 1), (2, 1, 2)])
def test_parameters_are_frozen_by_name_wherever_they_are(layout: tuple[int, int, int]) -> None:
    check(Setup(layout, SMALL, {}, {"named": True}))


def test_layers_unfrozen_into_a_new_group_are_trained() -> None:
    check(Setup((1, 2, 1), SMALL, {}, {"frozen": True}))


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("layout", "name", "options"),
    [
        ((1, 1, 2), "muon", {}),
        ((1, 2, 2), "muon", {}),
        ((1, 2, 2), "adafactor", {}),
        pytest.param((2, 1, 2), "muon", {}, marks=WIDE),
        pytest.param((1, 2, 2), "muon", {"optimizer_sharding": False}, marks=WIDE),
        pytest.param((1, 3, 1), "muon", {}, marks=WIDE),
        pytest.param((2, 2, 1), "muon", {}, marks=WIDE),
    ],
)
def test_matrices_are_put_together_for_an_optimizer_that_needs_them_whole(
    layout: tuple[int, int, int], name: str, options: dict[str, Any]
) -> None:
    setup = Setup(layout, {**SMALL, **options}, CLIP, {"optimizer": name})
    values = check(setup, 1e-5 if name == "adafactor" else 1e-9)
    if not options:  # every matrix has one owner
        whole = one_process(train, Setup((1, 1, 1), {}, {}, {"optimizer": name}))["state_elements"]
        assert max(value["state_elements"] for value in values) < 0.8 * whole


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Setup((1, 2, 1), SMALL), Setup((1, 3, 1), SMALL)),
        (Setup((2, 2, 1), SMALL), Setup((1, 2, 2), SMALL)),
        pytest.param(Setup((1, 3, 1), SMALL), Setup((2, 1, 1)), marks=WIDE),
        pytest.param(Setup((1, 2, 1), {"optimizer_sharding": False}), Setup((2, 2, 1), SMALL), marks=WIDE),
        (Setup((1, 2, 1), SMALL, {}, {"optimizer": "adagrad"}), Setup((1, 1, 1), {}, {}, {"optimizer": "adagrad"})),
        (Setup((1, 2, 2), SMALL, {}, {"optimizer": "muon"}), Setup((1, 1, 2), {}, {}, {"optimizer": "muon"})),
        pytest.param(*(Setup((2, size, 1), SMALL, {}, {"added": True}) for size in (1, 2)), marks=WIDE),
        pytest.param(*(Setup((size, 1, 1), SMALL, {}, {"added": True}) for size in (4, 1)), marks=WIDE),
        pytest.param(*(Setup((size, 2, 1), SMALL, {}, {"added": True}) for size in (1, 3)), marks=WIDE),
    ],
    ids=[
        "dp2 to dp3",
        "pp2xdp2 to dp2xtp2",
        "dp3 to pp2",
        "dp2 unshared to pp2xdp2",
        "adagrad, dp2 to one",
        "muon, dp2xtp2 to tp2",
        "group added, pp2 to pp2xdp2",
        "group added, pp4 to one",
        "group added, dp2 to pp3xdp2",
    ],
)
def test_a_run_goes_on_at_another_layout(first: Setup, second: Setup, tmp_path: Any) -> None:
    path = str(tmp_path / "half.ckpt")
    run_trainers(train, replace(first, trainer={"max_epochs": 1}), None, path, devices=first.devices)
    wanted = one_process(train, Setup(module=first.module))
    wanted["losses"], wanted["rates"] = wanted["losses"][4:], wanted["rates"][len(wanted["rates"]) // 2 :]
    for outcome in run_trainers(train, second, path, devices=second.devices):
        assert not differences(outcome.value, wanted, 1e-9)


@pytest.mark.parametrize("layout", [pytest.param((1, 2, 1), marks=WIDE), (2, 2, 1)], ids=["dp2", "pp2xdp2"])
def test_the_norm_is_logged_on_request(layout: tuple[int, int, int]) -> None:
    wanted = one_process(norms, Setup())
    setup = Setup(layout, {**SMALL, "log_gradient_norm": True})
    for outcome in run_trainers(norms, setup, devices=setup.devices):
        assert outcome.value == pytest.approx(wanted, rel=1e-5)  # Lightning keeps logged values in float32


LATE = {**SMALL, "overlap_parameter_gather": True}
UNSEEN = {**LATE, "bucket_size_mb": 1e-5, "whole_batch_loss": False}


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    ("layout", "own_use"),
    rows(
        {"dp2-weights used apart later": ((1, 2, 1), "later"), "pp2xdp2-modules called": ((2, 2, 1), None)},
        wide={
            "dp2-weights used apart": ((1, 2, 1), "always"),
            "dp2-modules called": ((1, 2, 1), None),
            "pp2xdp2-weights used apart": ((2, 2, 1), "always"),
            "pp2xdp2-weights used apart later": ((2, 2, 1), "later"),
        },
    ),
)
def test_weights_that_travel_during_the_next_step_are_waited_for(
    layout: tuple[int, int, int], own_use: str | None
) -> None:
    wanted = one_process(quiet, Setup(), own_use)["weights"]
    setup = Setup(layout, LATE)
    outcomes = run_trainers(quiet, setup, own_use, devices=setup.devices)
    assert all(outcome.value["pending"] and min(outcome.value["pending"]) > 2 for outcome in outcomes)
    for name, value in outcomes[0].value["weights"].items():
        assert torch.allclose(value, wanted[name], rtol=1e-9, atol=1e-9), name


def test_a_use_that_torch_does_not_report_is_refused() -> None:
    setup = Setup((1, 2, 1), UNSEEN)
    with pytest.raises(JobFailed, match=r"`apart.weight` was used in a function that torch does not report"):
        run_trainers(quiet, setup, "unseen", devices=2)


def test_weights_under_way_read_as_nan_where_torch_does_not_report_the_use() -> None:
    outcomes = run_trainers(quiet, Setup((1, 2, 1), UNSEEN), "unseen early", devices=2)
    assert all(bool(outcome.value["weights"]["net.transformer.wpe.weight"].isnan().all()) for outcome in outcomes[:1])


@pytest.mark.wide
def test_compiled_layers_find_updated_weights_there() -> None:
    wanted = one_process(quiet, Setup(), None)["weights"]
    outcomes = run_trainers(quiet, Setup((1, 2, 1), LATE), "compiled", devices=2)
    for name, value in outcomes[0].value["weights"].items():
        assert torch.allclose(value, wanted[name.replace("_orig_mod.", "")], rtol=1e-9, atol=1e-9), name


def test_a_hook_that_may_look_at_weights_keeps_the_gather_in_the_update() -> None:
    check(Setup((1, 2, 1), LATE, CLIP))


def test_an_optimizer_that_looks_at_its_groups_too_early_is_refused_by_name() -> None:
    with pytest.raises(JobFailed, match=r"`Early\.step` did not look into its parameter groups after it had called"):
        run_trainers(train, Setup((1, 2, 1), {}, {}, {"optimizer": "early"}), devices=2)
