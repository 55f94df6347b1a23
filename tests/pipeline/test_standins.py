"""Shapes that a stage takes the layers of other stages to return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.pipeline.elsewhere import standin
from lightning_megatron.pipeline.elsewhere.standin import OutputShapes, Sentinel


@dataclass
class Options:
    stride: int


class Shortening(nn.Module):
    """Keeps every n-th position; ``kept`` says n, in one form or another."""

    def __init__(self, kept: Any, read: Callable[[Any], int]) -> None:
        super().__init__()
        self.linear, self.kept, self._read = nn.Linear(4, 4), kept, read

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[:, :: self._read(self.kept)]


def _length(shapes: OutputShapes, layer: nn.Module) -> int:
    return shapes.stand_in(layer, Sentinel("layers.0"), layer.forward, (torch.zeros(2, 8, 4),), {}, False).size(1)


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda stride: stride, lambda kept: kept),
        (lambda stride: [0, (stride,)], lambda kept: kept[1][0]),
        (lambda stride: {"stride": stride}, lambda kept: kept["stride"]),
        (Options, lambda kept: kept.stride),
        (lambda stride: SimpleNamespace(stride=stride), lambda kept: kept.stride),
    ],
    ids=["number", "nested", "dictionary", "dataclass", "namespace"],
)
def test_layers_that_differ_in_what_they_keep_return_shapes_of_their_own(
    make: Callable[[int], Any], read: Callable[[Any], int]
) -> None:
    shapes = OutputShapes()
    assert [_length(shapes, Shortening(make(stride), read)) for stride in (1, 2, 4, 1)] == [8, 4, 2, 8]


def test_layers_that_are_alike_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[nn.Module] = []
    run = standin.abstract_run
    monkeypatch.setattr(standin, "abstract_run", lambda module, *rest: runs.append(module) or run(module, *rest))
    shapes, layers = OutputShapes(), [nn.TransformerEncoderLayer(4, 2, 8, batch_first=True) for _ in range(3)]
    assert [_length(shapes, layer) for layer in layers] == [8, 8, 8]
    assert runs == layers[:1]


def test_an_abstract_run_leaves_the_weights_of_the_layer() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    before = dict(layer.named_parameters())
    _length(OutputShapes(), layer)
    assert all(parameter is before[name] for name, parameter in layer.named_parameters())
