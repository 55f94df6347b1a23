"""Parameters that a step's loss does not depend on have no gradient, however the layers run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.scenario import Layout, differences, trainer_for
from tests.strategy.loss_modules import Task

WIDE = pytest.mark.wide


class Residual(nn.Module):
    """Takes its share of the input, and adds to the forecast."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.back, self.forth = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, rest: Tensor, forecast: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.hidden(rest).tanh()
        return rest - self.back(hidden), forecast + self.forth(hidden)


class Residuals(Task):
    """What the last layer leaves of the input has no part in the loss, which is one of the whole batch."""

    every = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(4))  # type: ignore[assignment]
        self.beside = nn.Linear(8, 8)
        self.double()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        rest = self.embed(x)
        forecast = torch.zeros_like(rest)
        self.beside(rest)
        for layer in self.layers:
            rest, forecast = layer(rest, forecast)
        found = self.head(forecast).logsumexp(-1).mean(1)
        loss = found.mean() / (1.0 + found.detach().std())
        return loss + rest.square().mean() if self.every and self.global_step % self.every == 1 else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class InSomeSteps(Residuals):
    """In every third step it has."""

    every = 3


class WithMomentum(InSomeSteps):
    """Momentum moves a parameter whose gradient is zero, and none that has no gradient."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class KeepsZeros(InSomeSteps):
    """Sets gradients to zero, not to ``None``."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


UNREACHED: dict[str, type[Task]] = {kind.__name__: kind for kind in (Residuals, InSomeSteps, WithMomentum, KeepsZeros)}


def unreached(info: RankInfo, layout: Layout | None, name: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Weights after two epochs."""
    trainer, module = trainer_for(info, layout, arguments, max_epochs=2), UNREACHED[name]()
    trainer.fit(module)
    state = module.state_dict() if layout is None else trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    return {key: value.clone() for key, value in state.items()}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("InSomeSteps", {"micro_batch_size": 2}),
        *(pytest.param(name, {"micro_batch_size": 2}, marks=WIDE) for name in UNREACHED if name != "InSomeSteps"),
        *(
            pytest.param(name, {"micro_batch_size": 2, "pipeline_schedule": schedule}, marks=WIDE)
            for name in UNREACHED
            for schedule in ("zb-v", "interleaved")
        ),
    ],
    ids=str,
)
def test_what_the_loss_of_a_whole_batch_does_not_reach_stays_without_gradient(
    name: str, arguments: dict[str, Any]
) -> None:
    expected = one_process(unreached, None, name, {})
    found = run_trainers(unreached, (2, 1), name, arguments, devices=2)[0]
    assert not list(differences("weights", found.value, expected, 1e-9)), found.output
