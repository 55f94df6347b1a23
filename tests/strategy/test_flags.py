"""Steps that go by which parameters are trained, and hooks that change it: stages hear of each other's."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor
from torch.optim import SGD, Optimizer

from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.scenario import Layout, differences, trained_state
from tests.strategy.loss_modules import Task

WIDE = pytest.mark.wide


class Counts(Task):
    """Unfreezes the layers; the loss counts what is trained."""

    def on_train_epoch_start(self) -> None:
        for parameter in self.layers.parameters():
            parameter.requires_grad = self.current_epoch > 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (1 + 0.1 * sum(parameter.requires_grad for parameter in self.parameters())) * self.each(x, y)


class Asks(Task):
    """Whether one layer is frozen."""

    def on_train_epoch_start(self) -> None:
        self.layers[0].requires_grad_(self.current_epoch > 0)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        frozen = not next(self.layers[0].parameters()).requires_grad
        return (0.5 if frozen else 1.0) * self.each(x, y)


class AsksByName(Asks):
    """The same of a weight."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (1.0 if self.layers[0][0].weight.requires_grad else 0.5) * self.each(x, y)


class Thaws(BaseFinetuning):
    """Trains the layers from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layers)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layers, optimizer)


class ByCallback(Counts):
    """Which unfreezes them."""

    def on_train_epoch_start(self) -> None:
        pass

    def configure_callbacks(self) -> list[Thaws]:
        return [Thaws()]

    def configure_optimizers(self) -> Optimizer:
        return SGD((parameter for parameter in self.parameters() if parameter.requires_grad), lr=0.1)


KINDS = {kind.__name__: kind for kind in (Counts, Asks, AsksByName, ByCallback)}
LAYOUTS: list[tuple[Layout, dict[str, Any]]] = [
    ((2, 1), {}),
    ((2, 1), {"pipeline_schedule": "interleaved"}),
    ((2, 1), {"pipeline_schedule": "zb-v"}),
    ((4, 1), {"whole_batch_loss": True}),
    ((2, 2), {}),
]


def train(info: RankInfo, layout: Layout | None, kind: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Weights after two epochs."""
    return trained_state(info, layout, arguments, KINDS[kind](), max_epochs=2)


@pytest.mark.parametrize(
    ("kind", "layout", "arguments"),
    [
        pytest.param(kind, layout, arguments, marks=() if (kind, at) == ("Asks", 0) else WIDE)
        for kind in KINDS
        for at, (layout, arguments) in enumerate(LAYOUTS)
    ],
    ids=str,
)
def test_weights_are_those_of_one_process(kind: str, layout: Layout, arguments: dict[str, Any]) -> None:
    expected = one_process(train, None, kind, {})
    first = run_trainers(train, layout, kind, arguments, devices=layout[0] * layout[1])[0]
    assert not list(differences("weights", first.value, expected, 1e-9)), first.output
