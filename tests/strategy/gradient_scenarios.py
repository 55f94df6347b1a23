"""Gradients that a hook puts elsewhere, and gradients of a kind that not every rank can sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trained_state
from tests.parity.zoo.loops import Walker
from tests.parity.zoo.tasks import TokenTask


class Rebound(TokenTask):
    """Lets the memory of gradients be other memory."""

    def __init__(self) -> None:
        super().__init__(Walker())
        self.net.head.weight = self.net.embed.weight

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.data = 0.5 * parameter.grad.data


class Sparse(TokenTask):
    """An embedding with sparse gradients."""

    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD

    def __init__(self) -> None:
        super().__init__(Walker())
        self.net.embed = nn.Embedding(*self.net.embed.weight.shape, sparse=True)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.1)  # type: ignore[call-arg]


class SparseAdam(Sparse):
    """With an optimizer that takes no other gradients."""

    optimizer = torch.optim.SparseAdam


class Lazy(TokenTask):
    """A head that has no shape yet."""

    def __init__(self) -> None:
        super().__init__(Walker())
        self.net.head = nn.LazyLinear(self.net.head.out_features)


KINDS: dict[str, type[TokenTask]] = {kind.__name__: kind for kind in (Rebound, Sparse, SparseAdam, Lazy)}


def train(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], kind: str) -> dict[str, Tensor]:
    """All weights after an epoch, on rank 0."""
    torch.manual_seed(7)
    return trained_state(info, layout, arguments, KINDS[kind](), max_epochs=1, limit_val_batches=0)
