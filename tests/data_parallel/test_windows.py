"""Weights of layers that are spread over the replicas train as in one process, and take the memory of a shard."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_megatron import MegatronStrategy
from lightning_megatron.data_parallel.windows.saved_weights import saved_weights
from lightning_megatron.data_parallel.windows.window import Window
from tests.data_parallel.sharing_scenarios import Setup
from tests.data_parallel.window_scenarios import Tailed, failed, spread
from tests.harness import JobFailed, one_process, run_trainers

SPREAD = {"weight_sharding": True}
ADDED_UP = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}
WIDE = pytest.mark.wide


def row(name: str, *values: Any, wide: bool = True) -> Any:
    return pytest.param(*values, id=name, marks=[WIDE] if wide else [])


def check(setup: Setup, *arguments: Any, tolerance: float = 1e-9) -> list[dict[str, Any]]:
    """Compares a run with a plain Trainer's."""
    wanted = one_process(spread, replace(setup, layout=None, strategy={}), *arguments)
    values = [
        outcome.value
        for outcome in run_trainers(
            spread, setup, *arguments, devices=setup.devices * setup.strategy.get("context_parallel_size", 1)
        )
    ]
    for value in values:
        assert not value["lost"], "weights are whole after a run"
        for name, weight in value["weights"].items():
            torch.testing.assert_close(weight, wanted["weights"][name], rtol=tolerance, atol=tolerance, msg=name)
        assert value["metrics"] == pytest.approx(wanted["metrics"], rel=1e-5)
    return values


@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=WIDE)])
def test_a_rank_keeps_its_shard_of_the_layers_and_two_whole_ones(replicas: int) -> None:
    for value in check(Setup((1, replicas, 1), {**SPREAD, "whole_batch_loss": False})):  # whose trials open some too
        count = value["count"]
        assert count["between"] == [0] * 8, "between steps nothing is whole"
        assert count["whole"] / replicas <= count["kept"] < 1.02 * count["whole"] / replicas
        assert count["most"] <= 3 * count["largest"], "two windows in a backward, and one that opens"
        first, later = 4 * 2 + 4, 4 * 2 + 3
        assert count["opened"] == first + 7 * later + 5, "a layer twice in a step, a tied head once less, all at last"
        assert count["ahead"] == 7 * (later - 1), "all but the first of a step, from the second step on"


@pytest.mark.parametrize(
    "layout", [(1, 2, 1), pytest.param((2, 2, 1), marks=WIDE), pytest.param((1, 2, 2), marks=WIDE)]
)
def test_frozen_weights_are_spread_too(layout: tuple[int, int, int]) -> None:
    for value in check(Setup(layout, SPREAD), "adapted"):
        count = value["count"]
        assert set(count["between"]) == {0}
        assert count["whole"] / 2 <= count["kept"] < 1.02 * count["whole"] / 2
        assert count["most"] <= 3 * count["largest"]
        total = sum(weight.numel() for name, weight in value["weights"].items()) if layout == (1, 2, 1) else 0
        assert count["whole"] > 0.9 * 8 * total, "all of a module but norms, biases and positions"


def test_a_graph_without_a_backward_is_freed_with_its_result() -> None:
    windows, owner = [Window("layer", 0, [])], mock.Mock()
    x = torch.randn(4, requires_grad=True)
    with saved_weights(windows, owner):
        result = x.exp()  # which saves what it gives
        other = x.exp()
    storage = StorageWeakRef(result.untyped_storage())
    del result
    assert storage.expired()
    other.mul_(2)
    with pytest.raises(RuntimeError, match="saved in `layer`, is at version 1; expected version 0"):
        other.sum().backward()


def test_layers_that_are_named_are_spread() -> None:
    named = {**SPREAD, "pipeline_layers": "tail"}
    block = 8 * sum(parameter.numel() for parameter in Tailed().net.transformer.h[0].parameters())
    for value in check(Setup((1, 2, 1), named), "tailed"):
        assert value["count"]["between"] == [0] * 8
        assert value["count"]["largest"] < block, "no window for the layers that would be found"


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("layout", "options", "trainer"),
    [
        row("dp2-added up", (1, 2, 1), {"micro_batch_size": 2}, ADDED_UP),
        row("dp2-recomputed", (1, 2, 1), {"activation_recompute": "full"}, ADDED_UP),
        row("dp4 in twos", (1, 4, 1), {"optimizer_sharding": {"shard": 2}}, {}),
        row(
            "dp2-summed behind micro-batches",
            (1, 2, 1),
            {"weight_sharding": {"sum": "micro_batch"}, "micro_batch_size": 2},
            ADDED_UP,
            wide=False,
        ),
        row(
            "dp4-shards of 2, summed",
            (1, 4, 1),
            {"weight_sharding": {"shard": 2, "sum": "micro_batch", "free": "step"}, "micro_batch_size": 2},
            ADDED_UP,
        ),
        row(
            "pp2xdp2-summed, 1f1b",
            (2, 2, 1),
            {"weight_sharding": {"sum": "micro_batch"}, "micro_batch_size": 2},
            ADDED_UP,
            wide=False,
        ),
        row(
            "pp2xdp2-summed, zb-v, recomputed",
            (2, 2, 1),
            {
                "weight_sharding": {"sum": "micro_batch"},
                "micro_batch_size": 2,
                "pipeline_schedule": "zb-v",
                "activation_recompute": "full",
            },
            ADDED_UP,
        ),
        row(
            "pp2xdp2xtp2-summed, interleaved",
            (2, 2, 2),
            {"weight_sharding": {"sum": "micro_batch"}, "micro_batch_size": 2, "pipeline_schedule": "interleaved"},
            {},
        ),
        row("cp2-summed", (1, 1, 1), {"context_parallel_size": 2, "weight_sharding": {"sum": "micro_batch"}}, {}),
        row("dp2-whole to the end", (1, 2, 1), {"weight_sharding": {"free": "step"}, "micro_batch_size": 2}, ADDED_UP),
        row("dp4-shards of 2", (1, 4, 1), {"weight_sharding": {"shard": 2, "free": "auto"}, "micro_batch_size": 2}, {}),
        row(
            "pp2xdp2-dict",
            (2, 2, 1),
            {"weight_sharding": {"free": "step"}, "micro_batch_size": 2, "pipeline_schedule": "zb-h1"},
            ADDED_UP,
        ),
        row("pp2xdp2-1f1b", (2, 2, 1), {"micro_batch_size": 2}, ADDED_UP),
        row("pp2xdp2-gpipe", (2, 2, 1), {"pipeline_schedule": "gpipe"}, {}),
        row("pp2xdp2-interleaved", (2, 2, 1), {"micro_batch_size": 2, "pipeline_schedule": "interleaved"}, ADDED_UP),
        row("pp2xdp2-zb-h1", (2, 2, 1), {"micro_batch_size": 2, "pipeline_schedule": "zb-h1"}, {}),
        row(
            "pp2xdp2-zb-v-recomputed",
            (2, 2, 1),
            {"micro_batch_size": 2, "pipeline_schedule": "zb-v", "activation_recompute": "full"},
            ADDED_UP,
            wide=False,
        ),
        row("pp2xdp2-dualpipe-v", (2, 2, 1), {"micro_batch_size": 2, "pipeline_schedule": "dualpipe-v"}, {}),
        row("dp2xtp2", (1, 2, 2), {}, ADDED_UP, wide=False),
        row("dp2xtp2-sequence", (1, 2, 2), {"sequence_parallel": True, "activation_recompute": "full"}, ADDED_UP),
        row("pp2xdp2xtp2-zb-h1", (2, 2, 2), {"micro_batch_size": 2, "pipeline_schedule": "zb-h1"}, ADDED_UP),
        row("pp2xdp2xtp2-dualpipe-v", (2, 2, 2), {"micro_batch_size": 2, "pipeline_schedule": "dualpipe-v"}, {}),
        row("cp2", (1, 1, 1), {"context_parallel_size": 2}, ADDED_UP, wide=False),
        row("dp2xcp2-recomputed", (1, 2, 1), {"context_parallel_size": 2, "activation_recompute": "full"}, {}),
        row("pp2xdp2xcp2", (2, 2, 1), {"context_parallel_size": 2, "micro_batch_size": 2}, ADDED_UP),
        row("dp2xtp2xcp2", (1, 2, 2), {"context_parallel_size": 2}, {}),
    ],
)
def test_weights_are_those_of_one_process(
    layout: tuple[int, int, int], options: dict[str, Any], trainer: dict[str, Any]
) -> None:
    for value in check(Setup(layout, {**SPREAD, **options}, trainer)):
        assert set(value["count"]["between"]) == {0}


@pytest.mark.parametrize(
    ("layout", "options", "trainer"),
    [
        row("dp2-routed", (1, 2, 1), {}, ADDED_UP, wide=False),
        row("dp4 in twos-routed", (1, 4, 1), {"weight_sharding": {"shard": 2}}, {}),
        row("pp2xdp2-routed", (2, 2, 1), {"micro_batch_size": 2}, ADDED_UP),
        row("pp2xdp2-routed, zb-v", (2, 2, 1), {"micro_batch_size": 2, "pipeline_schedule": "zb-v"}, {}),
        row("dp2-routed, recomputed", (1, 2, 1), {"activation_recompute": "full"}, {}),
        row("dp2-routed, to the end", (1, 2, 1), {"weight_sharding": {"free": "step"}, "micro_batch_size": 2}, {}),
        row("dp2-routed, summed", (1, 2, 1), {"weight_sharding": {"sum": "micro_batch"}, "micro_batch_size": 2}, {}),
    ],
)
def test_weights_without_a_gradient_on_some_replicas_keep_the_order_of_messages(
    layout: tuple[int, int, int], options: dict[str, Any], trainer: dict[str, Any]
) -> None:
    check(Setup(layout, {**SPREAD, **options}, trainer), "routed")


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("module", "layout", "trainer"),
    [
        row("strange", "strange", (1, 2, 1), {}, wide=False),
        row("writing", "writing", (1, 2, 1), {}, wide=False),
        row("tied", "tied", (1, 2, 1), {"accumulate_grad_batches": 2}, wide=False),
        row("strange-summed", "strange", (1, 2, 1), {"sums": True}),
        row("tied-summed", "tied", (1, 2, 1), {"accumulate_grad_batches": 2, "sums": True}, wide=False),
        row("hooked-summed", "hooked", (1, 2, 1), {"accumulate_grad_batches": 2, "sums": True}),
        row("tied-tp2", "tied", (1, 2, 2), {}),
        row("hooked", "hooked", (1, 2, 1), {"accumulate_grad_batches": 2}, wide=False),
        row("hooked-pp2", "hooked", (2, 2, 1), {}),
        row("writing-tp2", "writing", (1, 2, 2), {}),
    ],
)
def test_code_that_looks_at_weights_sees_whole_ones(
    module: str, layout: tuple[int, int, int], trainer: dict[str, Any]
) -> None:
    sums = {"weight_sharding": {"sum": "micro_batch"}} if trainer.get("sums") else SPREAD
    check(Setup(layout, sums, {name: value for name, value in trainer.items() if name != "sums"}), module)


_VALIDATES = {"limit_val_batches": 2, "val_check_interval": 1}


@pytest.mark.parametrize(
    ("layout", "options", "precision"),
    [
        row("dp2", (1, 2, 1), {}, "64-true", wide=False),
        row("pp2", (2, 2, 1), {"evaluation_micro_batch_size": 2, "weight_sharding": {"free": "layer"}}, "64-true"),
        row("tp2", (1, 2, 2), {}, "64-true"),
        row("bf16", (1, 2, 1), {}, "bf16-mixed"),
    ],
)
def test_validation_holds_two_layers_at_a_time(
    layout: tuple[int, int, int], options: dict[str, Any], precision: str
) -> None:
    setup = Setup(layout, {**SPREAD, **options}, _VALIDATES)
    if precision == "64-true":
        values = check(setup, "validated")
    else:
        whole = replace(setup, strategy={})
        wanted = run_trainers(spread, whole, "validated", None, precision, devices=setup.devices)[0].value
        values = [o.value for o in run_trainers(spread, setup, "validated", None, precision, devices=setup.devices)]
        assert all(value["metrics"] == wanted["metrics"] for value in values)
    for value in values:
        count = value["count"]
        assert len(count["evaluating"]) == 2 * 8, "two batches behind each step"
        assert 0 < max(count["evaluating"]) <= 2 * count["largest"], "a layer, and the next one"


@pytest.mark.everyday(1)
@pytest.mark.parametrize("module", ["validated twice", "validated unevenly"])
def test_weights_are_whole_where_replicas_may_validate_on_other_layers(module: str) -> None:
    for value in check(Setup((1, 2, 1), SPREAD, _VALIDATES), module):
        assert value["count"]["evaluating"] == []


def test_nothing_is_whole_between_steps_for_a_callback_that_cannot_look() -> None:
    for value in check(Setup((1, 2, 1), SPREAD), "plain", "counts"):
        assert value["count"]["between"] == [0] * 8
        assert value["metrics"]["batches"] == 8


@pytest.mark.parametrize(
    ("module", "layout", "precision"),
    [
        row("plain", "plain", (1, 2, 1), "64-true", wide=False),
        row("tied", "tied", (1, 2, 1), "64-true"),
        row("frozen", "adapted", (1, 2, 1), "64-true"),
        row("pp2", "plain", (2, 2, 1), "64-true"),
        row("tp2", "plain", (1, 2, 2), "64-true"),
        row("bf16", "plain", (1, 2, 1), "bf16-mixed"),
    ],
)
def test_checkpoints_are_written_from_shards_and_read_by_any_layout(
    module: str, layout: tuple[int, int, int], precision: str, tmp_path: Path
) -> None:
    saves = {"default_root_dir": str(tmp_path), "enable_checkpointing": True}
    setup = Setup(layout, SPREAD, saves)
    run = [o.value for o in run_trainers(spread, setup, module, "saves", precision, devices=setup.devices)]
    for value in run:
        assert value["count"]["saving"] == [0, 0], "nothing is made whole to be saved"
    (path,) = tmp_path.rglob("*step=3*")
    other = Setup((1, 2, 1), {}, saves)
    resumed = run_trainers(spread, other, module, "saves", precision, str(path), devices=2)[0].value
    for name, weight in resumed["weights"].items():
        torch.testing.assert_close(weight, run[0]["weights"][name], rtol=1e-9, atol=1e-9, msg=name)


def test_code_that_changes_what_is_saved_sees_whole_weights(tmp_path: Path) -> None:
    setup = Setup((1, 2, 1), SPREAD, {"default_root_dir": str(tmp_path), "enable_checkpointing": True})
    for outcome in run_trainers(spread, setup, "renaming", "saves", devices=2):
        assert min(outcome.value["count"]["saving"]) > 0


@pytest.mark.parametrize(
    ("callback", "module"), [row("averaged", "ema", {}), row("unfrozen", "unfreeze", {"frozen": True})]
)
def test_callbacks_of_lightnings_see_whole_weights(callback: str, module: dict[str, Any]) -> None:
    check(Setup((1, 2, 1), SPREAD, {}, module), "plain", callback, tolerance=1e-9 if module else 1e-6)


@pytest.mark.wide
@pytest.mark.parametrize("precision", [pytest.param("bf16-mixed"), pytest.param("bf16-true", marks=WIDE)])
def test_sixteen_bits_are_those_of_whole_weights(precision: str) -> None:
    setup = Setup((1, 2, 1), SPREAD)
    kept = run_trainers(spread, replace(setup, strategy={}), "plain", None, precision, devices=2)[0].value
    value = run_trainers(spread, setup, "plain", None, precision, devices=2)[0].value
    for name, weight in value["weights"].items():
        assert torch.equal(weight, kept["weights"][name]), name


def test_weights_that_stay_whole_to_the_end_of_a_step_are_gathered_once() -> None:
    options = {"weight_sharding": {"free": "step"}, "micro_batch_size": 2}
    for value in check(Setup((1, 2, 1), options)):
        count = value["count"]
        assert count["between"] == [0] * 8
        assert count["most"] == count["whole"], "all windows, once a step"
        assert count["opened"] == 8 * 5 + 5


def test_layers_are_freed_in_every_step_of_several_micro_batches_the_first_included() -> None:
    for value in check(Setup((1, 2, 1), {"weight_sharding": {"free": "layer"}, "micro_batch_size": 2})):
        count = value["count"]
        tied = count["whole"] - 4 * count["largest"]
        assert count["most"] <= 3 * count["largest"] + tied


@pytest.mark.wide
def test_gradients_that_are_summed_behind_micro_batches_take_shards_and_three_layers() -> None:
    options = {"weight_sharding": {"sum": "micro_batch"}, "micro_batch_size": 1}
    for value in check(Setup((1, 2, 1), options)):
        count = value["count"]
        assert count["gradients"] <= 3 * count["largest"] + 0.06 * count["whole"], "three sums under way; small parts"
        assert count["between"] == [0] * 8
    for value in check(Setup((1, 2, 1), {**SPREAD, "micro_batch_size": 1})):
        assert value["count"]["gradients"] >= value["count"]["whole"], "as they add up whole"


def test_a_number_that_divides_no_replicas_is_refused() -> None:
    with pytest.raises(
        JobFailed, match=r"`weight_sharding=\{'shard': 3\}` does not divide the 2 replicas; use one of \[2\]"
    ):
        run_trainers(spread, Setup((1, 2, 1), {"weight_sharding": {"shard": 3}}), devices=2)


def test_replicas_that_run_other_layers_are_told_which() -> None:
    with pytest.raises(JobFailed, match=r"`net.transformer.h.\d` runs while other replicas run another layer"):
        run_trainers(spread, Setup((1, 2, 1), SPREAD), "dropping", devices=2)


def test_a_trial_that_fails_on_one_replica_alone_ends_all_of_them_with_its_error() -> None:
    message = r"the step fails on a part of one replica's batch.*: ValueError: expected more than \d samples"
    with pytest.raises(JobFailed, match=message) as raised:
        run_trainers(spread, Setup((1, 2, 1), SPREAD), "choosy", devices=2)
    assert "killed" not in str(raised.value), "nobody waits for a window that the first replica does not open"


def test_a_weight_that_is_used_unseen_is_refused_by_name() -> None:
    with pytest.raises(JobFailed, match=r"`tower.weight` was used in a function that torch does not report"):
        run_trainers(spread, Setup((1, 2, 1), SPREAD), "unreported", devices=2)


@pytest.mark.parametrize("where", ["forward", pytest.param("backward", marks=WIDE), pytest.param("hook", marks=WIDE)])
def test_weights_are_whole_after_a_step_that_failed_everywhere(where: str) -> None:
    setup = Setup((1, 2, 1), SPREAD, {}, {"where": where})
    wanted = one_process(failed, replace(setup, layout=None, strategy={}))
    for outcome in run_trainers(failed, setup, devices=2):
        for name, weight in outcome.value.items():
            torch.testing.assert_close(weight, wanted[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_sharding": 2}, "`weight_sharding=2` must be True, False or a dict with 'shard', 'free', 'sum'"),
        ({"weight_sharding": {"shards": 2}}, "`weight_sharding` has 'shards'; it knows 'shard', 'free', 'sum'"),
        ({"weight_sharding": {"shard": 1}}, "must be a whole number of replicas above 1"),
        ({"weight_sharding": {"free": "late"}}, "must be one of 'auto', 'layer', 'step'"),
        ({"weight_sharding": {"sum": True}}, "must be one of 'micro_batch', 'step'"),
        ({"weight_sharding": {"shard": 2}, "optimizer_sharding": {"shard": 4}}, "differ"),
        ({"optimizer_sharding": False}, "needs `optimizer_sharding`"),
        ({"compile_layers": True}, "cannot be combined with `compile_layers=True`"),
        ({"overlap_parameter_gather": True}, "cannot be combined with `overlap_parameter_gather=True`"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MegatronStrategy(**{**SPREAD, **options})
