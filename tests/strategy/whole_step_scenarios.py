"""Optimizers that need all parameters together: closures that run again, and norms of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

from tests.harness import RankInfo
from tests.parity.scenario import Layout
from tests.parity.zoo.language import LearnedPositions
from tests.parity.zoo.tasks import TokenTask
from tests.strategy import loop_scenarios


class AroundAnother(Optimizer):
    """Sharpness-aware minimization around another optimizer, which has the same groups and a state of its own."""

    def __init__(self, parameters: Any, rho: float = 0.05) -> None:
        super().__init__(parameters, {"rho": rho, "lr": 0.1})
        self.inner = SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def members(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def ascend(self) -> None:
        norm = torch.stack([p.grad.norm() for p in self.members() if p.grad is not None]).norm()
        for p in self.members():
            assert p.grad is not None
            self.state[p]["before"] = p.clone()
            p.add_(p.grad * (0.05 / (norm + 1e-12)))

    @torch.no_grad()
    def descend(self) -> None:
        for p in self.members():
            p.data = self.state[p]["before"]
        self.inner.step()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        assert closure is not None
        again = torch.enable_grad()(closure)
        loss = again()
        self.ascend()
        again()
        self.descend()
        return loss


class Coupled(Optimizer):
    """Momentum scaled by the norm of the whole model's momentum; without closures, with a count and a mean."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.3})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        members = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in members:
            state = self.state[p]
            state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.3)
            state["count"] = state.get("count", 0) + 1
        norm = torch.stack([self.state[p]["mean"].norm() for p in members]).norm()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(self.state[p]["mean"], alpha=float(group["lr"] / (1.0 + norm)))
        return loss


class Marked(Optimizer):
    """Steps by a factor that each parameter carries; by the norm of the whole gradient, if ``coupled``."""

    def __init__(self, parameters: Any, *, coupled: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.coupled = coupled

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            members = [p for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in members]).norm() if self.coupled else 1.0
            for p in members:
                p.sub_(group["lr"] * getattr(p, "scale", 1.0) * p.grad / norm)
        return loss


class ListApart(Coupled):
    """Goes through a list of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.own = [p for group in self.param_groups for p in group["params"]]


class ByAnotherWay(Coupled):
    """Finds the parameters where no one sees it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        own = [p for group in self.param_groups for p in group["params"]]
        self.find = lambda: own

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        norm = torch.stack([p.grad.norm() for p in self.find() if p.grad is not None]).norm()
        for p in self.find():
            if p.grad is not None:
                p.sub_(p.grad / norm, alpha=0.01)
        return loss


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "wolfe": lambda parameters: LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn="strong_wolfe"),
    "around another": AroundAnother,
    "coupled": Coupled,
    "marked": lambda parameters: Marked(parameters, coupled=False),
    "marked, coupled": lambda parameters: Marked(parameters, coupled=True),
    "list apart": ListApart,
    "another way": ByAnotherWay,
}


class Together(TokenTask):
    """Updated by one of the optimizers, in two groups where it takes them, with a frozen bias."""

    def __init__(self, kind: str) -> None:
        super().__init__(LearnedPositions())
        self.kind = kind
        for place, parameter in enumerate(self.parameters()):
            parameter.scale = 1.0 + 0.3 * place  # type: ignore[attr-defined]
        next(p for name, p in self.named_parameters() if name.endswith("bias")).requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.token.scale = 1.0 + batch_idx  # type: ignore[attr-defined]

    @property
    def token(self) -> nn.Parameter:
        return next(p for name, p in self.named_parameters() if name.endswith("weight"))

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        groups = [{"params": parameters[:5]}, {"params": parameters[5:]}]
        return OPTIMIZERS[self.kind](parameters if self.kind == "wolfe" else groups)


class BeyondStep(Together):
    """Calls the parts of the optimizer's step itself."""

    def __init__(self) -> None:
        super().__init__("around another")
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.ascend()
        optimizer.zero_grad()
        loss: Tensor = self.loss(batch)
        self.manual_backward(loss)
        optimizer.descend()
        self.log("train_loss", loss.detach())


def fit(info: RankInfo, layout: Layout | None, arguments: Any, kind: str, options: Any) -> Any:
    """As the loops' own, of a module of this file."""
    loop_scenarios.MODULES["together"] = BeyondStep if kind == "beyond step" else lambda: Together(kind)
    return loop_scenarios.fit(info, layout, arguments, "together", options)
