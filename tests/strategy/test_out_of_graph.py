"""Steps that take values out of the graph of their loss: the loss is a mean over samples, and its gradient another."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.pipeline.elsewhere.reachable import functions_of_step
from lightning_megatron.strategy.hooks.backward_code import lines_out_of_graph
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.scenario import Layout, differences, trained_state
from tests.strategy.loss_modules import Task

WIDE = pytest.mark.wide
WHOLE = "each batch runs whole"


class TwoLosses(Task):
    """The sum of two means, in which gradients are those of samples."""

    padded_from = 24

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        predicted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        return self.together(predicted, logits.square().mean())

    def together(self, predicted: Tensor, size: Tensor) -> Tensor:
        """Of both."""
        return predicted + size + (3 * size).detach()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Normalised(TwoLosses):
    """Each divided by itself."""

    def together(self, predicted: Tensor, size: Tensor) -> Tensor:
        return predicted / predicted.detach() + size / size.detach()


class Balanced(TwoLosses):
    """The second scaled to the first, by a number."""

    def together(self, predicted: Tensor, size: Tensor) -> Tensor:
        return predicted + size * (predicted / size).item()


def balanced(_: object, predicted: Tensor, size: Tensor) -> Tensor:
    """Of both, the second scaled to the first."""
    return predicted + size * (predicted / size).item()


class NamedOtherwise(TwoLosses):
    """By a function that has another name."""

    together = balanced  # type: ignore[assignment]


class Joined:
    """Puts two losses together."""

    def __call__(self, predicted: Tensor, size: Tensor) -> Tensor:
        return predicted + size * (predicted / size).item()


class Held(TwoLosses):
    """By an object that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.joined = Joined()

    def together(self, predicted: Tensor, size: Tensor) -> Tensor:
        return self.joined(predicted, size)


class Decorated(Balanced):
    """By what a method without gradients gives."""

    @torch.no_grad()
    def scale(self, predicted: Tensor, size: Tensor) -> Tensor:
        """Of the second."""
        return predicted / size

    def together(self, predicted: Tensor, size: Tensor) -> Tensor:
        return predicted + size * self.scale(predicted, size)


class Later(Balanced):
    """From the second epoch on."""

    def together(self, predicted: Tensor, size: Tensor) -> Tensor:
        return super().together(predicted, size) if self.current_epoch else predicted + size


class Through(TwoLosses):
    """Logits pass as they are, and gradients without their mean."""

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits - (logits.mean(0) - logits.mean(0).detach())


class TwoCalls(TwoLosses):
    """The layers are called twice, and what the second call gives counts as much as what the first does."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        first, second = (
            torch.nn.functional.cross_entropy(self(each).flatten(0, 1), y.flatten()) for each in (x, x.flip(1))
        )
        return self.both(first, second)

    def both(self, first: Tensor, second: Tensor) -> Tensor:
        """Together."""
        return first + second * (first / second).detach()


class TwoCallsAlike(TwoCalls):
    """What is taken out of the graph is added."""

    def both(self, first: Tensor, second: Tensor) -> Tensor:
        return first + second + (first * 2).detach()


class BySome(TwoLosses):
    """One of them, by the targets: in the second step not the same for all micro-batches."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.high = y.double().numpy().mean() > 9.1  # which no trial follows
        return super().loss(x, y)

    def together(self, predicted: Tensor, size: Tensor) -> Tensor:
        return predicted.detach() + size if self.high else predicted + size.detach()


class CutBySome(TwoLosses):
    """Layers are cut off where targets are high: on one replica, in the first step."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        logits = self.head(h.detach() if y.double().numpy().mean() > 7.8 else h)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


ALIKE: tuple[type[Task], ...] = (TwoLosses, TwoCallsAlike)
OTHERS: tuple[type[Task], ...] = (
    Normalised,
    Balanced,
    NamedOtherwise,
    Held,
    Decorated,
    Later,
    Through,
    TwoCalls,
    BySome,
    CutBySome,
)
KINDS = {kind.__name__: kind for kind in (*ALIKE, *OTHERS)}
COMPARED = [kind for kind in KINDS if not kind.endswith("BySome")]


def train(info: RankInfo, layout: Layout | None, kind: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Weights after two epochs."""
    return trained_state(info, layout, arguments, KINDS[kind](), max_epochs=2)


@pytest.mark.parametrize(
    ("kind", "layout", "arguments"),
    [
        pytest.param(kind, layout, arguments, marks=() if (kind, at) in {("Later", 0), ("TwoCalls", 0)} else WIDE)
        for kind in COMPARED
        for at, (layout, arguments) in enumerate(
            [
                ((2, 1), {}),
                ((1, 1), {}),
                ((4, 1), {"micro_batch_size": 1}),
                ((2, 1), {"pipeline_schedule": "zb-v"}),
                ((2, 1), {"pipeline_schedule": "interleaved"}),
                ((2, 1), {"activation_recompute": "full"}),
                ((2, 1), {"whole_batch_loss": True}),
            ]
        )
    ],
    ids=str,
)
def test_gradients_are_those_of_one_process(kind: str, layout: Layout, arguments: dict[str, Any]) -> None:
    expected = one_process(train, None, kind, {})
    first = run_trainers(train, layout, kind, arguments, devices=layout[0] * layout[1])[0]
    assert not list(differences("weights", first.value, expected, 1e-9)), first.output
    if "whole_batch_loss" not in arguments:
        assert (WHOLE in first.output) == (KINDS[kind] not in ALIKE)
    if kind == "TwoCallsAlike" and layout[0] > 1 and not arguments.get("whole_batch_loss"):
        assert "take turns" in first.output


@pytest.mark.parametrize("arguments", [{}, pytest.param({"micro_batch_size": "auto"}, marks=WIDE)])
@pytest.mark.parametrize("kind", ["TwoLosses", "Balanced", pytest.param("Later", marks=WIDE)])
def test_replicas_say_that_each_does_so_with_its_own_samples(kind: str, arguments: dict[str, Any]) -> None:
    first, _ = run_trainers(train, (1, 2), kind, arguments, devices=2, check=False)
    said = re.sub(r"\s+", " ", f"{first.error}\n{first.output}")  # a warning is an error here
    assert ("with its own samples, where one process has those of all" in said) == (kind != "TwoLosses"), said
    assert kind == "TwoLosses" or "`item` in " in said


@pytest.mark.parametrize("layout", [(2, 1), pytest.param((1, 1), marks=WIDE)])
def test_what_is_seen_late_is_told_with_the_steps_before(layout: Layout) -> None:
    for outcome in run_trainers(train, layout, "BySome", {}, devices=layout[0], check=False, grace=20.0):
        said = re.sub(r"\s+", " ", f"{outcome.error}\n{outcome.output}")  # a warning is an error here
        assert WHOLE in said or outcome.rank, said
        assert "up to step 1 the micro-batches" in said or outcome.rank, said


@pytest.mark.parametrize(
    ("layout", "arguments"),
    [
        pytest.param(layout, arguments, marks=() if at == 1 else WIDE)
        for at, (layout, arguments) in enumerate(
            [
                ((1, 2), {}),
                ((1, 2), {"whole_batch_loss": True}),  # no trial finds it before the backward
                ((1, 2), {"whole_batch_loss": False}),
                ((1, 2), {"whole_batch_loss": True, "weight_sharding": {"sum": "micro_batch"}}),
                ((1, 2), {"whole_batch_loss": True, "activation_recompute": "full"}),
                ((2, 2), {}),
                ((2, 2), {"whole_batch_loss": True}),
            ]
        )
    ],
    ids=str,
)
def test_replicas_of_which_one_cuts_its_layers_off_are_refused_where_they_share_weights(
    layout: Layout, arguments: dict[str, Any]
) -> None:
    arguments, devices = {"weight_sharding": True, **arguments}, 2 * layout[0]
    outcomes = run_trainers(train, layout, "CutBySome", arguments, devices=devices, check=False, grace=20.0)
    said = [f"{outcome.error}\n{outcome.output}" for outcome in outcomes]
    assert any("which layers run, or which the loss comes to, depends on the batch" in each for each in said), said
    assert all(outcome.error and "killed" not in outcome.error and "gloo" not in outcome.error for outcome in outcomes)


def test_lines_that_only_log_are_not_listed() -> None:
    names = {
        kind: [line.split("`")[1] for line in lines_out_of_graph(functions_of_step(KINDS[kind]()))] for kind in KINDS
    }
    assert names["TwoLosses"] == names["Through"][1:] == ["detach"]
    assert "item" in names["Balanced"] and {"item", "no_grad"} <= {*names["Decorated"]}
