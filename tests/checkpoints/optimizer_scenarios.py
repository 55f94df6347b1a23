"""Optimizers that keep more of a parameter than tensors of its shape and type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from tests.checkpoints.reshard_scenarios import END, Grid, Losses, Tied
from tests.data_parallel.sharing_scenarios import evaluated
from tests.harness import RankInfo
from tests.parity.train import make_trainer
from tests.strategy.whole_step_scenarios import Coupled


class Counting(Optimizer):
    """Steps that shrink with a count, which is a plain number; remembers the last three counts in a list."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = evaluated(closure)
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["last"] = [*state.get("last", []), state["count"]][-3:]
                parameter.add_(parameter.grad, alpha=-group["lr"] * len(state["last"]) / state["count"])
        return loss


KINDS: dict[str, Callable[..., Optimizer]] = {
    "counting": Counting,
    "nadam": torch.optim.NAdam,  # keeps a product in float32, whatever its parameters are
    "lbfgs": lambda parameters, lr: torch.optim.LBFGS(parameters, lr, max_iter=2),  # lists of tensors
    "coupled": lambda parameters, lr: Coupled(parameters),  # steps on whole parameters
}


class Odd(Tied):
    """Updated by one of ``KINDS``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return KINDS[self.kind](self.parameters(), lr=0.05)


def losses_of(info: RankInfo, kind: str, grid: Grid, path: str, resume: bool) -> list[float]:
    """Losses of a run that saves in the middle, or of one that goes on from there."""
    losses = Losses(None if resume else path)
    trainer = make_trainer(info, grid.strategy(), max_steps=END, callbacks=[losses], use_distributed_sampler=True)
    trainer.fit(Odd(kind), ckpt_path=path if resume else None)
    return losses.values
