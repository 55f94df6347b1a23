"""A module is read and tried on copies: whatever its code remembers, it is afterwards as it was."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections import deque
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from lightning_megatron.mesh.marks import Marks
from lightning_megatron.parallelize import explain
from lightning_megatron.parallelize.reading.copy import copy_of
from lightning_megatron.parallelize.reading.inputs import run_examples
from lightning_megatron.parallelize.reading.replay import Replay
from lightning_megatron.parallelize.reading.trace import trace
from tests.parallelize.models import Block, CausalSelfAttention

WIDTH = 16


class Remembers(nn.Module):
    """Everything that ordinary code keeps from one call to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH, 4, CausalSelfAttention)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.half = self.mean[: WIDTH // 2]
        self.ready, self.calls, self.log, self.nested = False, 0, [], {"sizes": deque([1])}
        self.masks: dict[int, Tensor] = {}
        self.lock = threading.Lock()
        counted = [0]

        def count(*_: Any) -> None:
            counted[0] += 1

        self.counted = counted
        self.block.register_forward_hook(count)
        self.project = lambda x: F.linear(x, self.tied)
        self.tied = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            with torch.no_grad():
                self.scale.copy_(1 / (1 + x.flatten(0, -2).std(0)))
            self.ready = True
        self.calls += 1
        self.log.append(x.shape)
        self.nested["sizes"].append(x.shape[1])
        self.masks[x.shape[1]] = x.new_ones(x.shape[1])
        self.last = x
        self.mean.lerp_(x.detach().flatten(0, -2).mean(0), 0.1)
        noise = random.random() + np.random.rand() + torch.rand(())
        return self.project(self.block(x * self.scale)) + 0 * noise


def state(module: Remembers) -> tuple[Any, ...]:
    """All that a run could have changed."""
    kept = {key for part in module.modules() for key in vars(part)}
    tensors = {name: x.tolist() for name, x in module.state_dict().items()}
    plain = (module.ready, module.calls, list(module.log), list(module.nested["sizes"]), list(module.masks))
    modes = [part.training for part in module.modules()]
    return tensors, kept, *plain, list(module.counted), modes, module.half.tolist()


def generators() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_plan_leaves_no_trace_in_the_module_or_in_random_generators(sequence_parallel: bool) -> None:
    module = nn.Module()
    module.embed, module.layers = nn.Embedding(50, WIDTH), nn.ModuleList(Remembers() for _ in range(2))
    module.forward = lambda ids: module.layers[1](module.layers[0](module.embed(ids)))
    before, drawn = [state(layer) for layer in module.layers], generators()
    plan = {"mlp.0": "colwise", "mlp.2": "rowwise"}
    if sequence_parallel:
        with pytest.raises(ValueError, match="mixes tokens"):
            explain(module, 2, plan, True)
    else:
        assert explain(module, 2).source == "rules" and explain(module, 2, plan).source == "argument"
    assert [state(layer) for layer in module.layers] == before and generators() == drawn


class Counted(nn.Module):
    """Counts how often a weight is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("times", torch.zeros(()))

    def forward(self, weight: Tensor) -> Tensor:
        self.times += 1
        return weight * 1.0


def test_weights_that_are_computed_are_neither_split_nor_computed_by_a_plan() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
            self.block, self.mixed = Block(WIDTH, 4, CausalSelfAttention), nn.MultiheadAttention(WIDTH, 4)
            register_parametrization(self.embed, "weight", Counted())
            register_parametrization(self.mixed, "in_proj_weight", Counted())

        def forward(self, ids: Tensor) -> Tensor:
            x = self.block(self.embed(ids))
            return self.head(x + self.mixed(x, x, x)[0])

    module = Normed()
    before = {name: float(times) for name, times in module.named_buffers() if name.endswith("times")}
    report = explain(module, 2)
    assert any(not sharding.replicated for sharding in report.parameters.values())
    computed = [sharding for name, sharding in report.parameters.items() if name.startswith(("embed.", "mixed."))]
    assert computed and all(sharding.replicated for sharding in computed)
    assert {name: float(times) for name, times in module.named_buffers() if name.endswith("times")} == before


def test_runs_do_not_see_each_other() -> None:
    module = Remembers()
    x = torch.randn(2, 3, WIDTH)
    replay = Replay(module, (x,), {})
    (one, first), (two, second) = replay.run(), replay.run()
    assert torch.equal(first, second) and one.calls == two.calls == 1 and module.calls == 0
    assert one.counted == two.counted == [1] and module.counted == [0]
    inner = replay.at("block.mlp")
    _, output = inner.run()
    assert inner.args[0].shape == x.shape and output.shape == x.shape and module.calls == 0
    with pytest.raises(LookupError, match="'lost' was not called"):
        module.lost = nn.Linear(2, 2)
        replay.at("lost")


def test_a_part_is_kept_as_it_was_when_it_was_called() -> None:
    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            self.inner.told = int(x.shape[0])
            try:
                return self.inner(x)
            finally:
                del self.inner.told

    kept = Replay(Told(), (torch.ones(3, 2),), {}).at("inner")
    assert kept.part.told == 3


def test_a_copy_shares_memory_until_it_is_written_to() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    module[0].register_buffer("table", torch.zeros(6))
    module[0].view = module[0].table[2:]
    module[0].weight.kind = "tied"
    places = [x.data_ptr() for x in module.state_dict().values()]
    copied = copy_of(module)
    assert copied[0].weight is copied[1].weight and copied[0].weight.kind == "tied"
    assert torch._C._is_cow_tensor(copied[0].weight)
    copied(torch.ones(1, 4)).sum().backward()
    assert torch._C._is_cow_tensor(copied[0].weight) and module[0].weight.grad is None
    values = module[0].weight.tolist()
    with torch.no_grad():
        copied[0].weight.fill_(7)
        copied[0].table[3] = 5
    assert module[0].weight.tolist() == values and copied[0].view[1] == 5 and not module[0].table.any()
    del copied
    assert [x.data_ptr() for x in module.state_dict().values()] == places


def test_what_a_module_does_not_own_or_cannot_be_copied_is_shared() -> None:
    module = Remembers()
    module.data = torch.utils.data.TensorDataset(torch.ones(3))
    module.array = torch.from_numpy(np.ones(3))
    copied = copy_of(module)
    assert copied.data is module.data and copied.lock is module.lock
    copied.array += 1
    assert module.array.tolist() == [1, 1, 1]
    with torch.no_grad():
        copied.tied.zero_()
    assert not copied.project(torch.ones(2, WIDTH)).any() and module.project(torch.ones(2, WIDTH)).all()


class Watched(pl.LightningModule):
    """Its methods are hooks of its layers, which log and look at the trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, 4, CausalSelfAttention) for _ in range(2))
        self.steps: list[int] = []
        for block in self.blocks:
            block.register_forward_hook(self.look)

    def look(self, block: nn.Module, args: Any, output: Tensor) -> None:
        self.log("norm", output.norm())
        self.steps.append(self.trainer.global_step)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_hooks_that_look_at_the_trainer_run_in_copies_of_a_layer() -> None:
    module = Watched()
    module.trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    copied = copy_of(module.blocks[0])
    copied(torch.ones(1, 2, WIDTH))
    (hook,) = copied._forward_hooks.values()
    assert hook.__self__ is not module and hook.__self__.steps == [0] and module.steps == []
    report = explain(module, 2, example=torch.ones(1, 2, WIDTH))
    assert "x2" in report.explain() and module.steps == []


class Failing(nn.Module):
    """Notes who ran it, and fails where it is told to."""

    def __init__(self, runners: list[weakref.ref[nn.Module]], fails: bool) -> None:
        super().__init__()
        self.note, self.fails = runners.append, fails
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.note(weakref.ref(self))
        x = self.layer(x)
        if self.fails:
            raise ValueError("as told")
        return x


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_is_freed_with_its_trial(fails: bool) -> None:
    runners: list[weakref.ref[nn.Module]] = []
    module = Failing(runners, fails)
    Marks.of(module).put("a value that copies have too")
    gc.disable()
    try:
        try:
            trace(module, (torch.ones(2, WIDTH),), {})
        except ValueError:
            assert fails
        assert runners and not any(runner() for runner in runners)
    finally:
        gc.enable()


class Sides(nn.Module):
    """Takes two tensors whose sizes nobody guesses."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.side = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), nn.Linear(3, 8)
        self.example_input_array = torch.randn(2, 8), torch.randn(2, 3)

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        return self.net(x) + self.side(side)


def test_an_example_is_read_in_the_dtype_of_the_module():
    found, why = run_examples(Sides().double())
    assert found is not None and found.roots == [""] and "side" in found.calls, why
