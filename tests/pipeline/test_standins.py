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
from lightning_megatron.pipeline.elsewhere.away import Away
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


class Reading(nn.Module):
    """Returns a number that it reads off its data besides its output."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._read = read

    def forward(self, x: Tensor) -> Any:
        return x + 1, self._read(x)


USES: list[Callable[[Any], Any]] = [
    lambda number: number + 1,
    lambda number: 2.0 * number,
    lambda number: torch.ones(2) * number,
    lambda number: torch.tensor(number),
    lambda number: float(number),
    lambda number: int(number),
    lambda number: 1 if number else 2,
    lambda number: number > 0,
    lambda number: number == 1,
    lambda number: sum([1, number]),
    lambda number: max(0, number),
    lambda number: f"{number:.2f}",
    lambda number: range(number),
    lambda number: {number: 1},
    lambda number: number.real,
]


@pytest.mark.parametrize("use", range(len(USES)))
@pytest.mark.parametrize(
    "read",
    [lambda x: float(x.mean()), lambda x: int(x.sum()), lambda x: bool(x.sum() > 1)],
    ids=["float", "int", "bool"],
)
def test_a_number_that_another_stage_reads_off_its_data_is_refused_when_it_is_used(
    use: int, read: Callable[[Tensor], Any]
) -> None:
    layer, x = Reading(read), torch.ones(2, 8, 4)
    _, number = OutputShapes().stand_in(layer, Sentinel("layers.0", True), layer.forward, (x,), {}, False)
    assert isinstance(number, type(read(x))) and "layers.0" in repr([number])
    with pytest.raises(RuntimeError, match="returns a number that it reads off its data"):
        USES[use](number)


def test_a_number_that_follows_from_shapes_is_one() -> None:
    layer = Reading(lambda x: x.size(1))
    _, number = OutputShapes().stand_in(layer, Sentinel("layers.0"), layer.forward, (torch.ones(2, 8, 4),), {}, False)
    assert number + 1 == 9


def test_an_object_of_ones_own_is_filled_with_stand_ins() -> None:
    @dataclass
    class Output:
        hidden: Tensor
        more: dict[str, Any]

    layer = Reading(lambda x: Output(x[:, :3], {"mean": x.mean(), "length": x.size(1)}))
    _, output = OutputShapes().stand_in(layer, Sentinel("layers.0"), layer.forward, (torch.ones(2, 8, 4),), {}, False)
    assert isinstance(output, Output) and output.hidden.shape == (2, 3, 4) and output.more["length"] == 8
    assert type(output.hidden) is type(output.more["mean"]) is Away


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
