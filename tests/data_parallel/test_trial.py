"""The trial that finds out what an optimizer updates by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.data_parallel.update.trial import Independence, independence_of
from tests.data_parallel.sharing_scenarios import Insisting

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Repeating(torch.optim.SGD):
    """Calls its closure twice, if it has one."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        if closure is not None:
            closure()
        return super().step(closure)


class ByMark(torch.optim.SGD):
    """Divides the gradients of marked parameters by their norms."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if getattr(parameter, "as_matrix", False):
                parameter.grad /= parameter.grad.norm()
        return super().step(closure)


def test_attributes_of_parameters_are_tried() -> None:
    parameters = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(5, 3))]
    assert independence_of(ByMark(parameters, lr=0.1), torch.device("cpu")) is Independence.ELEMENT
    parameters[1].as_matrix = True  # type: ignore[attr-defined]
    assert independence_of(ByMark(parameters, lr=0.1), torch.device("cpu")) is Independence.PARAMETER


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda parameters: torch.optim.Adagrad(parameters, initial_accumulator_value=0.1), Independence.ELEMENT),
        (lambda parameters: torch.optim.AdamW(parameters, lr=0.0, foreach=True), Independence.ELEMENT),
        (lambda parameters: Insisting(parameters, lr=0.1), Independence.ELEMENT),
        (lambda parameters: Repeating(parameters, lr=0.1), Independence.NONE),
        (lambda parameters: torch.optim.Adafactor(parameters), Independence.PARAMETER),
        (lambda parameters: torch.optim.LBFGS(parameters), Independence.NONE),
    ],
    ids=["adagrad", "adamw", "insisting", "repeating", "adafactor", "lbfgs"],
)
@pytest.mark.parametrize("first", [(), (1,), (3, 2)], ids=["scalar", "vector", "matrix"])
def test_an_optimizer_is_known_whatever_its_first_parameter_looks_like(
    make: Make, wanted: Independence, first: tuple[int, ...]
) -> None:
    parameters: Any = [nn.Parameter(torch.ones(first)), nn.Parameter(torch.ones(5, 3))]
    assert independence_of(make(parameters), torch.device("cpu")) is wanted
