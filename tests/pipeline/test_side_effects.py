"""What layers leave behind, from one virtual stage to the next, without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.pipeline.elsewhere.away import Away, unmarked
from lightning_megatron.pipeline.elsewhere.containers import Container
from lightning_megatron.pipeline.elsewhere.reachable import Reach
from lightning_megatron.pipeline.stage import side_effects
from lightning_megatron.pipeline.stage.boundary import Boundary, Leaf
from lightning_megatron.pipeline.stage.side_effects import SideEffects

TABLES: dict[int, Tensor] = {}


class Shared(nn.Module):
    """A table that the first layer to ask makes for all of them."""

    table: Tensor | None = None

    def forward(self) -> Tensor:
        if self.table is None:
            self.table = torch.ones(5000)
        return self.table


class Layer(nn.Module):
    """Keeps what it is told to keep."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared
        self.keeps = True
        self.kept: Any = None
        self.large: Any = None

    def forward(self, x: Tensor) -> Tensor:
        scale = self.shared()[0] * TABLES.setdefault(3, torch.ones(6000))[0]
        if self.keeps:
            self.kept, self.large = (x * scale).mean(), torch.ones(4097)
        return x * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = Shared()
        self.layers = nn.ModuleList([Layer(shared), Layer(shared)])


def follow(net: Net) -> SideEffects:
    return SideEffects(net, ["layers.0", "layers.1"], 2, torch.device("cpu"))


def run_first(effects: SideEffects, net: Net, *, first: bool = True) -> Boundary:
    """The first stage's run of layer 0; what it sends besides the hidden state."""
    effects.begin((0, 1), "training_step", 0, Boundary(), first)
    x = torch.ones(2, requires_grad=True)
    (effects.around if effects.looks else lambda _, run, args, __: run(*args))(0, net.layers[0], (x,), {})
    luggage = effects.pack()
    effects.end()
    if luggage is None:
        return Boundary()
    tensors = [tensor.detach().requires_grad_() for tensor in luggage.tensors]
    leaves = tuple(Leaf(-1, tuple(tensor.shape), tensor.dtype, True) for tensor in tensors)
    return Boundary(leaves, tensors, effects=luggage.effects)


def test_a_layer_that_is_given_tuples_of_tensors_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder's layers are given rotary embeddings for each token, and a search takes longer than a small layer."""
    searched = []

    class Counted(Reach):
        def containers(self, arguments: tuple[Any, ...] = ()) -> list[Container]:
            searched.append(arguments)
            return super().containers(arguments)

    monkeypatch.setattr(side_effects, "Reach", Counted)
    effects, x, table = follow(Net()), torch.ones(2), [torch.ones(2)]
    for _ in range(3):
        effects.containers(0, "layers.0", (x, (x, None)), {"rotary": (x, x)})
    assert searched == [()]
    assert any(c.value is table for c in effects.containers(0, "layers.0", (x, (x, table)), {}))
    assert len(searched) == 2


def test_shared_tables_are_made_by_each_stage_and_kept_values_arrive() -> None:
    TABLES.clear()
    here, there = Net(), Net()
    sent = run_first(follow(here), here)
    TABLES.clear()
    later = follow(there)
    later.begin((1, 2), "training_step", 0, sent, True)
    later.repeat(0, (torch.zeros(2),), {}, None)
    layer: Any = there.layers[0]
    assert layer.kept.requires_grad and float(layer.kept.detach()) == 1 and type(layer.large) is Away
    output = later.around(1, there.layers[1], (torch.ones(2),), {})
    later.finish_trunk()
    later.note_finished()
    later.end()
    assert type(output) is Tensor and type(there.layers[0].shared.table) is Tensor and type(TABLES[3]) is Tensor

    data = later.take_step()
    assert data is not None
    third = Net()
    follow(third).repeat_step(data)
    assert not third.layers[0].kept.requires_grad and float(third.layers[1].kept) == 1
    assert third.layers[0].large is None


def test_a_layer_that_begins_to_keep_something_is_refused_with_its_name() -> None:
    net = Net()
    effects = follow(net)
    net.layers[0].keeps = False
    net.layers[0].shared()
    TABLES.setdefault(3, torch.ones(6000))
    assert run_first(effects, net).effects is None
    assert run_first(effects, net, first=False).effects is None
    net.layers[0].keeps = True
    with pytest.raises(RuntimeError, match=r"layer `layers\.0` wrote to `layers\.0` in a later `training_step`"):
        run_first(effects, net, first=False)


def test_a_longer_table_in_a_later_step_is_the_layers_own_affair() -> None:
    net = Net()
    effects = follow(net)
    net.layers[0].keeps = False
    net.layers[0].shared()
    TABLES.setdefault(3, torch.ones(6000))
    assert run_first(effects, net).effects is None
    net.layers[0].shared.table = None
    net.layers[0].shared.table = torch.ones(5000)
    assert run_first(effects, net, first=False).effects is None
    net.layers[0].shared.table = None
    assert run_first(effects, net, first=False).effects is None


class Adding(nn.Module):
    """Adds to a sum with a gradient and to a number."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Any = 0.0
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x.mean()
        self.calls += 1
        return x


def adders() -> Net:
    net = Net()
    net.layers = nn.ModuleList([Adding(), Adding()])
    return net


def run_adder(effects: SideEffects, net: Net, micro_batch: int) -> Boundary:
    """The first stage's run of layer 0 in one micro-batch; what it sends."""
    effects.begin((0, 1), "training_step", micro_batch, Boundary(), micro_batch == 0)
    effects.around(0, net.layers[0], (torch.ones(2, requires_grad=True),), {})
    luggage = effects.pack()
    effects.end()
    assert luggage is not None
    tensors = [tensor.detach().requires_grad_() for tensor in luggage.tensors]
    leaves = tuple(Leaf(-1, tuple(tensor.shape), tensor.dtype, True) for tensor in tensors)
    return Boundary(leaves, tensors, effects=luggage.effects)


def test_sums_that_the_step_sets_back_begin_anew_in_each_micro_batch_and_counts_go_on() -> None:
    here, there = adders(), adders()
    first, last = follow(here), follow(there)
    layer: Any = there.layers[0]
    for micro_batch in range(3):
        sent = run_adder(first, here, micro_batch)
        last.begin((1, 2), "training_step", micro_batch, sent, micro_batch == 0)
        last.repeat(0, (torch.zeros(2),), {}, None)
        last.around(1, there.layers[1], (torch.ones(2),), {})
        assert float(layer.total.detach()) == 1 and layer.total.requires_grad and layer.calls == micro_batch + 1
        layer.total = 0.0
        last.finish_trunk()
        last.note_finished()
        last.end()
    assert here.layers[0].total == 0.0, "it hangs on no graph of a micro-batch that is done"
    data = last.take_step()
    assert data is not None
    here.layers[0].total = 5.0
    first.repeat_step(data)
    assert (here.layers[0].total, here.layers[0].calls) == (0.0, 3)


def test_a_count_that_the_step_sets_back_between_micro_batches_is_refused() -> None:
    here, there = adders(), adders()
    first, last = follow(here), follow(there)
    for micro_batch in range(2):
        sent = run_adder(first, here, micro_batch)
        last.begin((1, 2), "training_step", micro_batch, sent, micro_batch == 0)
        if micro_batch:
            with pytest.raises(RuntimeError, match=r"`layers\.0` goes on from the value of `layers\.0`, entry 'calls'"):
                last.repeat(0, (torch.zeros(2),), {}, None)
            return
        last.repeat(0, (torch.zeros(2),), {}, None)
        layer: Any = there.layers[0]
        layer.calls, layer.total = 0, 0.0
        last.note_finished()
        last.end()


def test_logs_inside_of_layers_are_told_and_those_of_shape_runs_are_not() -> None:
    told: list[Any] = []
    here, there = adders(), adders()
    there.log = lambda *args, **kwargs: told.append((args, kwargs))  # type: ignore[assignment]
    first, last = follow(here), follow(there)
    with unmarked():
        assert first.take_log(("shape", 1.0), {})
    first.begin((0, 1), "training_step", 0, Boundary(), True)
    assert not first.take_log(("between", 1.0), {})

    def logging(x: Tensor) -> Tensor:
        assert first.take_log(("inside", x.mean()), {"prog_bar": True})
        with pytest.raises(RuntimeError, match=r"layer `layers\.0` calls `self\.log\('odd', \.\.\.\)` with an object"):
            first.take_log(("odd", object()), {})
        return x

    first.around(0, logging, (torch.full((2,), 3.0),), {})
    luggage = first.pack()
    assert luggage is not None
    first.end()
    last.begin((1, 2), "training_step", 0, Boundary(effects=luggage.effects), True)
    last.repeat(0, (torch.zeros(2),), {}, None)
    assert [(args[0], float(args[1]), kwargs) for args, kwargs in told] == [("inside", 3.0, {"prog_bar": True})]
    last.end()
