"""Over replicas a loss is that of one process, or the user is told in what it is each replica's own."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback

from lightning_megatron.strategy.data.joined_batches import in_order, joined_batches
from lightning_megatron.strategy.loss.over_replicas import samples_in
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.scenario import Layout, count_as_one_process, differences, trainer_for
from tests.strategy.loop_scenarios import fit
from tests.strategy.loss_modules import UNLIKE_STEPS, WEIGHED, Unlike
from tests.strategy.test_losses import trained

WIDE = pytest.mark.wide
UNCUT: dict[str, Any] = {"micro_batch_size": "auto"}
LAYOUTS: list[tuple[Layout, dict[str, Any]]] = [
    ((1, 2), UNCUT),
    ((1, 4), UNCUT),
    ((1, 8), UNCUT),
    ((1, 2), {**UNCUT, "tensor_parallel_size": 2}),
    ((1, 2), {**UNCUT, "context_parallel_size": 2}),
    ((1, 2), {**UNCUT, "weight_sharding": {"free": "layer"}}),
    ((1, 2), {**UNCUT, "optimizer_sharding": False}),
    ((1, 2), {**UNCUT, "random_streams": "layout"}),
    ((1, 2), {"micro_batch_size": 1}),
    ((2, 2), {"micro_batch_size": 4}),
    ((2, 2), {**UNCUT, "pipeline_schedule": "zb-v"}),
]
EVERYDAY = ("padded", "zero_head", "late", "logs", "sum", "followed", "balanced", "rebalanced")
ROWS = [
    pytest.param(name, layout, arguments, marks=() if number == 0 and name in EVERYDAY else WIDE)
    for number, (layout, arguments) in enumerate(LAYOUTS)
    for name in (*WEIGHED, "followed", "balanced", "rebalanced")
]


@pytest.mark.everyday(2)
@pytest.mark.parametrize(("name", "layout", "arguments"), ROWS, ids=str)
def test_losses_of_replicas_count_as_in_one_process(name: str, layout: Layout, arguments: Mapping[str, Any]) -> None:
    count_as_one_process(trained, name, layout, arguments)


LAYOUTS_SAID: list[Any] = [
    pytest.param((1, 2), UNCUT, id="dp2"),
    pytest.param((2, 2), {"micro_batch_size": 4}, id="pp2xdp2", marks=WIDE),
    pytest.param((1, 8), UNCUT, id="dp8", marks=WIDE),
]
SAID = {
    "in_batch": r"two parts of a batch at once, .* it depends on which samples it sees together. Each of the \d repl",
    "normed": r"`layers.0.3` \(BatchNorm1d\) computes over the samples of each of the",
    "unlike": "nor joined with that of another replica .*: pass `micro_batch_loss_weight=...`",
    "logs_others": r"`ratio` \(.*loss_modules.py:\d+\) for a batch is not made of what its",
}


@pytest.mark.everyday(2)
@pytest.mark.parametrize(("layout", "arguments"), LAYOUTS_SAID)
@pytest.mark.parametrize("name", SAID)
def test_what_is_each_replicas_own_is_said(name: str, layout: Layout, arguments: Mapping[str, Any]) -> None:
    found = run_trainers(trained, layout, name, arguments, devices=layout[0] * layout[1], check=False, grace=20.0)
    assert re.search(SAID[name], f"{found[0].error}{found[0].output}"), found[0].error


APART: list[tuple[Layout, dict[str, Any]]] = [
    ((2, 2), {"micro_batch_size": 2}),
    ((2, 2), {"micro_batch_size": 1}),
    ((2, 2), UNCUT),
    ((1, 2), {"micro_batch_size": 2}),
    ((1, 2), UNCUT),
]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("layout", "arguments"), APART, ids=str)
def test_that_pairs_of_samples_are_apart_is_said(layout: Layout, arguments: Mapping[str, Any]) -> None:
    found = run_trainers(trained, layout, "pairs_apart", arguments, devices=math.prod(layout), check=False, grace=20.0)
    said = r"is made of pairs of samples .*Each of the 2 replicas has that number of its own samples"
    assert re.search(said, f"{found[0].error}{found[0].output}"), found[0].error


@WIDE
def test_that_losses_of_manual_optimization_are_not_tried_is_said() -> None:
    found = run_trainers(fit, (1, 2), {}, "manual", {}, devices=2)
    assert "`automatic_optimization=False`: losses of the 2 replicas count the same" in found[0].output
    assert (
        "count the same"
        not in run_trainers(fit, (1, 2), {"whole_batch_loss": False}, "manual", {}, devices=2)[0].output
    )


@pytest.mark.everyday(1)
@pytest.mark.parametrize("name", ["scaled_beside_gathered", "scaled_by_gradients"])
@pytest.mark.parametrize("layout", [(1, 2), (2, 2)])
def test_that_a_step_scales_by_gradients_of_its_replica_is_said(layout: Layout, name: str) -> None:
    found = run_trainers(fit, layout, {}, name, {}, devices=math.prod(layout), check=False, grace=20.0)
    said = (
        r"\(`torch.autograd.grad` in \S*loop_scenarios.py:\d+\)\. Each of the 2 replicas has those of its own samples"
    )
    assert re.search(said, f"{found[0].error}"), found[0].error


@pytest.mark.everyday(1)
@pytest.mark.parametrize("name", ["in_batch", "logs_others"])
def test_messages_of_shared_weights_are_not_taken_for_the_steps_own(name: str) -> None:
    arguments = {**UNCUT, "weight_sharding": True}
    found = run_trainers(trained, (1, 2), name, arguments, devices=2, check=False, grace=20.0)
    assert re.search(SAID[name], f"{found[0].error}{found[0].output}"), found[0].error


def test_nothing_is_said_where_the_user_means_each_replicas_own() -> None:
    run_trainers(trained, (1, 2), "in_batch", {"whole_batch_loss": False}, devices=2)


@pytest.mark.parametrize("name", ["uneven", "uneven_rows"])
@pytest.mark.parametrize(
    ("layout", "arguments"),
    [
        ((1, 2), UNCUT),
        pytest.param((1, 4), UNCUT, marks=WIDE),
        pytest.param((1, 2), {**UNCUT, "optimizer_sharding": False}, marks=WIDE),
        pytest.param((1, 2), {**UNCUT, "random_streams": "layout"}, marks=WIDE),
        pytest.param((1, 2), {**UNCUT, "weight_sharding": {"free": "layer"}}, marks=WIDE),
        pytest.param((2, 2), UNCUT, marks=WIDE),
        pytest.param((1, 2), {"micro_batch_size": 2}, marks=WIDE),
        pytest.param((2, 2), {"micro_batch_size": 1}, marks=WIDE),
        pytest.param((2, 2), {"micro_batch_size": 4}, marks=WIDE),
        pytest.param((1, 4), {"micro_batch_size": 1}, marks=WIDE),
    ],
    ids=str,
)
def test_replicas_with_unlike_numbers_of_samples_weigh_as_many(
    name: str, layout: Layout, arguments: Mapping[str, Any]
) -> None:
    count_as_one_process(trained, name, layout, arguments)


@pytest.mark.parametrize(
    ("layout", "arguments"),
    [((1, 2), UNCUT), ((1, 2), {"micro_batch_size": 2}), pytest.param((2, 2), {"micro_batch_size": 1}, marks=WIDE)],
    ids=str,
)
def test_replicas_may_have_other_kinds_of_batches_in_a_step(layout: Layout, arguments: Mapping[str, Any]) -> None:
    expected = one_process(trained, None, "kinds", {})
    found = run_trainers(trained, layout, "kinds", arguments, devices=layout[0] * layout[1])[0]
    assert not list(differences("weights", found.value["weights"], expected["weights"], 1e-9)), found.output


def count_targets(batch: Any) -> int:
    return int((batch[1] != -100).sum())


def test_replicas_whose_samples_cannot_be_joined_count_what_the_user_says() -> None:
    expected = one_process(trained, None, "unlike", {})
    arguments = {**UNCUT, "micro_batch_loss_weight": count_targets}
    found = run_trainers(trained, (1, 2), "unlike", arguments, devices=2)[0]
    for what in ("weights", "logged"):
        assert not list(differences(what, found.value[what], expected[what], 1e-9)), found.output


def gathered(info: RankInfo, layout: Layout, arguments: Mapping[str, Any]) -> list[int]:
    """How often objects are gathered up to the end of each step."""
    from lightning_megatron.mesh.messages import objects

    counts, own = [0], objects.gather
    ends: list[int] = []

    def gather(*args: Any) -> Any:
        counts[0] += 1
        return own(*args)

    class Ends(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            ends.append(counts[0])

    with patch.object(objects, "gather", gather), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that of batches which cannot be tried
        trainer_for(info, layout, arguments, max_epochs=1, callbacks=[Ends()]).fit(Unlike())
    return ends


def test_batches_that_cannot_be_tried_are_looked_at_now_and_then() -> None:
    ends = run_trainers(gathered, (1, 2), {**UNCUT, "whole_batch_loss": "auto"}, devices=2)[0].value
    assert len(ends) == UNLIKE_STEPS and ends[-1] == ends[7] > ends[6] == ends[0] > 0  # in steps 1 and 8


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ((torch.zeros(4, 3), torch.ones(4, dtype=torch.int64)), 4),
        ((torch.zeros(4, 3), torch.tensor([3, 0, 1, 2])), 4),  # a place of each sample, or an error that is caught
        ({"x": torch.zeros(6, 3), "edges": torch.zeros(2, 9, dtype=torch.int64)}, 0),
        ({"x": torch.zeros(6, 3), "weights": torch.zeros(17)}, 6),
        ([torch.zeros(3), torch.zeros(5)], 2),
        (None, 0),
        ((torch.zeros(4), object()), 0),
    ],
)
def test_samples_are_taken_apart_where_no_numbers_point_at_others(batch: Any, samples: int) -> None:
    assert samples_in(batch) == samples


def test_batches_are_joined_with_lists_and_arrays_of_their_samples() -> None:
    one = {"x": torch.ones(2, 3), "text": ["a", "b"], "n": np.arange(2), "ragged": [torch.ones(2), torch.ones(3)]}
    other = {"x": torch.zeros(1, 3), "text": ["c"], "n": np.array([7]), "ragged": [torch.ones(1)]}
    both = joined_batches(one, {**one, "text": ["c", "d"]})
    assert both["x"].shape == (4, 3) and both["text"] == ["a", "b", "c", "d"] and both["n"].tolist() == [0, 1, 0, 1]
    assert [len(each) for each in both["ragged"]] == [2, 3, 2, 3]
    assert in_order(both, [0, 2, 1, 3])["text"] == ["a", "c", "b", "d"]
    assert joined_batches(one, other) is None, "a list of one tensor is not told from a tensor of the batch"
    del one["ragged"], other["ragged"]
    assert joined_batches(one, other)["n"].tolist() == [0, 1, 7]
    assert joined_batches(one, {**other, "x": torch.zeros(1, 4)}) is None
    assert joined_batches(one, {**other, "n": torch.ones(1)}) is None
