"""Parameters that a step's loss does not depend on have no gradient, however the layers run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.pipeline.run.unreached import Unreached, is_no_gradient, no_gradient
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.scenario import Layout, differences, trained_state
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


def two_linears() -> nn.Sequential:
    """A layer that tensor ranks can share."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


class Probed(Task):
    """The layers are cut off from the loss in the first epoch."""

    layer: Callable[[], nn.Module] = staticmethod(two_linears)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.layer() for _ in range(4))  # type: ignore[assignment]
        self.double()

    def hidden(self, x: Tensor) -> Tensor:
        """What the last layer gives."""
        h: Tensor = self.embed(x)
        for layer in self.layers:
            h = h + layer(h)
        return h

    def cut(self, h: Tensor) -> Tensor:
        """Its output, as the head takes it."""
        return h.detach() if self.current_epoch == 0 else h

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.cut(self.hidden(x)))
        return logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class ProbedAtLast(Probed):
    """In the second."""

    def cut(self, h: Tensor) -> Tensor:
        return h.detach() if self.current_epoch == 1 else h


class ProbedInTurn(Probed):
    """In every other step."""

    def cut(self, h: Tensor) -> Tensor:
        return h.detach() if self.global_step % 2 else h


class CutInside(Probed):
    """Between two layers of one stage."""

    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.embed(x)
        for number, layer in enumerate(self.layers):
            h = h + layer(h)
            h = h.detach() if number == 2 and self.current_epoch == 0 else h
        return h

    def cut(self, h: Tensor) -> Tensor:
        return h


class WithoutGraph(Probed):
    """The layers run without gradients in the first epoch, with sums between them."""

    def hidden(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.current_epoch > 0):
            return super().hidden(x)

    def cut(self, h: Tensor) -> Tensor:
        return h


class Followed(nn.Module):
    """Hands a second value on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = two_linears()

    def forward(self, x: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.inner(x), beside


class Beside(Probed):
    """A second value goes through all layers, and no loss depends on it in the first epoch."""

    layer = Followed

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Linear(8, 8).double()

    def hidden(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        beside = self.beside(h.detach())
        for layer in self.layers:
            h, beside = layer(h, beside)
        return h + 0.1 * beside if self.current_epoch else h

    def cut(self, h: Tensor) -> Tensor:
        return h


PROBED = (Probed, ProbedAtLast, ProbedInTurn, CutInside, WithoutGraph, Beside)
UNREACHED: dict[str, type[Task]] = {
    kind.__name__: kind for kind in (Residuals, InSomeSteps, WithMomentum, KeepsZeros, *PROBED)
}


def unreached(info: RankInfo, layout: Layout | None, name: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Weights after two epochs."""
    return trained_state(info, layout, arguments, UNREACHED[name](), max_epochs=2)


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


@pytest.mark.parametrize(
    ("name", "layout", "arguments"),
    [
        ("Probed", (2, 1), {}),
        ("WithoutGraph", (2, 1), {"pipeline_schedule": "zb-v"}),
        *(
            pytest.param(kind.__name__, layout, arguments, marks=WIDE)
            for kind in PROBED
            for layout, arguments in [
                ((2, 1), {}),
                ((4, 1), {}),
                ((2, 1), {"pipeline_schedule": "zb-v"}),
                ((2, 1), {"pipeline_schedule": "interleaved"}),
                ((2, 1), {"activation_recompute": "full"}),
                ((2, 1), {"variable_shapes": True}),
                ((2, 2), {}),
                ((2, 2), {"weight_sharding": True}),
                ((2, 1), {"tensor_parallel_size": 2}),
            ]
            if (kind.__name__, layout, arguments) != ("Probed", (2, 1), {})
        ),
    ],
    ids=str,
)
def test_weights_before_a_cut_in_the_graph_stay_as_they_are(
    name: str, layout: Layout, arguments: dict[str, Any]
) -> None:
    expected = one_process(unreached, None, name, {})
    devices = layout[0] * layout[1] * arguments.get("tensor_parallel_size", 1)
    found = run_trainers(unreached, layout, name, {"micro_batch_size": 2, **arguments}, devices=devices)[0]
    assert not list(differences("weights", found.value, expected, 1e-9)), found.output


def test_an_accelerator_looks_at_gradients_until_a_step_has_given_them() -> None:
    sends, hears = Unreached(looks_always=False), Unreached(looks_always=False)
    value, like = torch.ones(2, 3), torch.zeros(2, 3)

    def step(*gradients: Tensor | None) -> list[Tensor | None]:
        heard = [hears.received(lambda: "key", sends.to_send(lambda: "key", [(like, each)]))[0] for each in gradients]
        for each in (sends, hears):
            each.settle()
            each.drop()
        return heard

    assert step(None, None) == [None, None]
    assert step(None, value) == [None, value]
    first, second = step(None, value)
    assert first is not None and second is value
    assert not first.any()
    with pytest.raises(RuntimeError, match="does not depend on what the layers before give, as it did"):
        step(None, None)
    sends.drop()
    hears.drop()
    sends.forget(heard=False)
    hears.forget(heard=True)
    assert step(None, None) == [None, None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64])
def test_no_number_is_taken_for_a_missing_gradient(dtype: torch.dtype) -> None:
    assert is_no_gradient(no_gradient(torch.zeros(3, 2, dtype=dtype)))
    for number in (0.0, 1.0, float("inf"), float("nan"), -float("nan")):
        assert not is_no_gradient(torch.full((3, 2), number, dtype=dtype))
    ones = torch.full((torch.zeros((), dtype=dtype).itemsize,), 255, dtype=torch.uint8)
    assert not is_no_gradient(ones.view(dtype))
    assert not is_no_gradient(torch.zeros(0, dtype=dtype))
