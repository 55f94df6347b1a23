"""Batches that cannot be cut along dimension 0: whole where that is asked for, and else a message about cutting."""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.strategy.loss.counted import Counted, Untold, unlike_weights
from lightning_megatron.strategy.loss.said import say_how_cut
from tests.harness import run_trainers
from tests.parity.scenario import differences
from tests.strategy import cut_scenarios as cuts

WHOLE = {"micro_batch_size": 1024}


@pytest.mark.parametrize("kind", ["packed", "sequence_first"])
def test_a_batch_of_another_shape_stays_whole_where_that_is_said(kind: str) -> None:
    (plain,) = run_trainers(cuts.train, None, {}, kind, devices=1)
    outcomes = run_trainers(cuts.train, (2, 1), WHOLE, kind, devices=2)
    found = list(differences("", outcomes[0].value, plain.value, 1e-9))
    assert not found, "\n".join(found[:10])


def test_one_that_only_the_loss_cannot_cut_runs_whole_by_itself() -> None:
    (plain,) = run_trainers(cuts.train, None, {}, "sequence_first", devices=1)
    outcomes = run_trainers(cuts.train, (2, 1), {"micro_batch_size": "auto"}, "sequence_first", devices=2)
    found = list(differences("", outcomes[0].value, plain.value, 1e-9))
    assert not found, "\n".join(found[:10])
    assert "the layers run in 6 micro-batches" in outcomes[0].output
    assert "each batch runs whole" not in outcomes[0].output


@pytest.mark.parametrize("stages", [1, 2])
def test_batches_of_two_loaders_of_unlike_length_run_whole(stages: int) -> None:
    (plain,) = run_trainers(cuts.combined, None, {}, devices=1)
    outcomes = run_trainers(cuts.combined, (stages, 1), {"micro_batch_size": 1}, devices=stages)
    found = list(differences("", outcomes[0].value, plain.value, 1e-9))
    assert not found, "\n".join(found[:10])
    assert "Such batches run whole" in outcomes[0].output


@pytest.mark.parametrize("stages", [2, pytest.param(1, marks=pytest.mark.wide)])
def test_a_graph_whose_edges_point_at_all_of_its_nodes_runs_whole(stages: int) -> None:
    (plain,) = run_trainers(cuts.graphs, None, {}, devices=1)
    outcomes = run_trainers(cuts.graphs, (stages, 1), {"micro_batch_size": 2}, devices=stages)
    found = list(differences("", outcomes[0].value, plain.value, 1e-9))
    assert not found, "\n".join(found[:10])
    assert "that may point at samples, as the edges of a graph do" in outcomes[0].output


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.wide), 1])
def test_graphs_over_replicas_run_whole_and_are_averaged(stages: int) -> None:
    (plain,) = run_trainers(cuts.graphs, None, {}, 4, devices=1)
    arguments = {"micro_batch_size": 2, "whole_batch_loss": False}
    outcomes = run_trainers(cuts.graphs, (stages, 2), arguments, 2, devices=2 * stages)
    found = list(differences("", outcomes[0].value, plain.value, 1e-9))
    assert not found, "\n".join(found[:10])


def test_what_a_batch_counts_by_may_be_missing_in_another() -> None:
    labels, counted = torch.tensor([[1, -100], [2, 3]]), Counted(1, False, -100)
    assert counted.tells({"first": labels, "second": labels}) and not counted.tells({"first": labels})
    assert not unlike_weights([counted], None, {"first": labels}, [{"first": labels[:1]}, {"first": labels[1:]}])
    parts = [{"first": labels[:1], "second": labels[:1]}, {"first": labels[1:], "second": labels[1:]}]
    assert unlike_weights([counted], None, {"first": labels, "second": labels}, parts)


def test_else_the_error_says_how_the_batch_was_cut_and_what_to_do() -> None:
    auto = {"micro_batch_size": "auto"}
    outcomes = run_trainers(cuts.train, (2, 1), auto, "packed", devices=2, check=False, grace=20.0)
    texts = [f"{outcome.error}\n{outcome.output}" for outcome in outcomes]
    assert any("along dimension 0 of its tensors, which are" in text for text in texts), "\n".join(texts)
    assert not any("killed" in (outcome.error or "killed") for outcome in outcomes)


def test_one_that_nobody_can_cut_runs_where_nothing_is_cut() -> None:
    (plain,) = run_trainers(cuts.train, None, {}, "opaque", devices=1)
    (outcome,) = run_trainers(cuts.train, (1, 1), {"micro_batch_size": "auto"}, "opaque", devices=1)
    found = list(differences("", outcome.value, plain.value, 1e-9))
    assert not found, "\n".join(found[:10])


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("shape '[8, -1]' is invalid for input of size 4")])
def test_code_that_counts_on_the_whole_batch_is_told_how_to_keep_it_whole(error: Exception) -> None:
    with pytest.raises(type(error)):
        raise error
    say_how_cut(error, torch.zeros(8, 2), 4)
    (note,) = error.__notes__
    assert "counts on all of them (`x.view(8, -1)`), set `micro_batch_size=8` or more" in note


def test_batches_that_count_a_little_otherwise_are_tried_less_and_less() -> None:
    way, untold = Counted(0, False, 0), Untold()
    assert all(untold.may_tell({way: 0.01}, step) for step in range(1, 17))
    assert not untold.may_tell({}, 17) and not untold.may_tell({way: 0.01}, 17) and not untold.may_tell({way: 0.02}, 18)
    assert untold.may_tell({way: 0.03}, 18) and not untold.may_tell({way: 0.06}, 19)
    assert [step for step in range(19, 200) if untold.may_tell({way: 0.01}, step)] == [36, 72, 144]
    assert untold.may_tell(
        {way: 0.01, Counted(0, False, -100): 0.001}, 200
    )  # which counts otherwise for the first time
