"""What a run of the user's code has not reached, and which weights it has used beside their layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.parallelize.reading.weight_uses import WeightUses
from lightning_megatron.parallelize.trial.branches import LinesRun


def attend(x: Any, layer: Any, kind: str) -> Any:
    """Whatever lies between projections, with branches."""
    q = heads(x)
    if kind == "keeps":
        layer.kept = q
    if kind == "views":
        q = q.reshape(-1)
    if kind == "lists":
        layer.all.append(q)
    if kind == "returns":
        return x, q
    if kind == "computes":
        q = q + q @ q
    if kind == "raises":
        raise ValueError(q.view(-1))
    return q


def heads(x: Any) -> Any:
    """A function of its own."""
    return x.view(2, -1)


def plain(x: Any, kind: str) -> Any:
    """The same without a branch that keeps or views."""
    q = heads(x)
    if kind == "computes":
        return q @ q
    if kind == "raises":
        raise ValueError(f"{x.view(-1)}")
    return q


def one_of(x: Any, layer: Any, kind: str) -> Any:
    """One branch alone."""
    q = heads(x)
    if kind:
        layer.kept = q
    return q


def checked(x: Any, layer: Any, kind: str) -> Any:
    """A branch that may raise on its way."""
    q = heads(x)
    if kind:
        if kind == "raises":
            raise ValueError(kind)
        layer.kept = q
    return q


class Viewed:
    """Something with views."""

    def view(self, *sizes: int) -> Viewed:
        """Itself."""
        return self


@pytest.mark.parametrize(
    ("run", "complete"),
    [
        (lambda: attend(Viewed(), SimpleNamespace(), ""), False),
        (lambda: plain(Viewed(), ""), True),
        (lambda: checked(Viewed(), SimpleNamespace(), ""), False),
        (lambda: one_of(Viewed(), SimpleNamespace(), ""), False),
        (lambda: one_of(Viewed(), SimpleNamespace(), "kept"), True),
        (lambda: (one_of(Viewed(), SimpleNamespace(), "kept"), one_of(Viewed(), SimpleNamespace(), "")), True),
    ],
)
def test_a_branch_that_keeps_views_or_returns_split_tensors_has_to_run(run, complete):
    with LinesRun() as lines:
        run()
    assert lines.is_complete([heads.__code__], {"view", "reshape"}) is complete


def test_code_that_views_nothing_may_leave_out_branches():
    with LinesRun() as lines:
        one_of(Viewed(), SimpleNamespace(), "")
    assert lines.is_complete([plain.__code__], {"view"})


class Uses(nn.Module):
    """Code beside a layer that uses its weight.

    Args:
        use: what it does.
    """

    def __init__(self, use: Any) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(4, 4), use

    def forward(self, x: Tensor) -> Tensor:
        self.use(x, self.layer.weight)
        found: Tensor = self.layer(x)
        return found


@pytest.mark.parametrize(
    ("use", "used"),
    [
        (lambda x, weight: weight.new_tensor(range(3)), False),
        (lambda x, weight: weight.new_zeros(2, 3), False),
        (lambda x, weight: x.to(weight), False),
        (lambda x, weight: x.type_as(weight), False),
        (lambda x, weight: weight.dtype, False),
        (lambda x, weight: weight.to(x.dtype), True),
        (lambda x, weight: torch.zeros_like(weight), True),
        (lambda x, weight: weight.shape, True),
    ],
)
def test_a_weight_that_lends_its_dtype_is_not_used(use, used):
    module = Uses(use)
    with WeightUses(module, ["layer"]) as uses:
        module(torch.ones(2, 4))
    assert uses.used == ({"layer.weight"} if used else set())
