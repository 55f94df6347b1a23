"""Hooks that cannot come to weights are told by their source, and all others count as seeing them."""

from __future__ import annotations

import functools
import gc
import time
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_megatron.strategy.hooks.blind import hook_is_blind, is_blind
from tests.benchmarks.contestants import Stopwatch

KEPT = nn.Linear(2, 2)
KEEPS = [KEPT]


def norm(module: Any) -> float:
    return float(module.weight.norm())


def elsewhere() -> float:
    return norm(KEPT)


class Times(Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.begun = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.note(time.perf_counter() - self.begun)
        pl_module.log("epoch", trainer.current_epoch)
        if trainer.lightning_module.global_step > 3:
            trainer.should_stop = True

    def note(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds = state_dict["seconds"]


class Holds(Callback):
    def __init__(self, model: Any = KEPT) -> None:
        self.models = [model]

    def on_train_batch_end(self, *_: Any) -> None:
        print(self.models)


class Keeps(Callback):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.module = pl_module

    def on_train_batch_end(self, *_: Any) -> None:
        print(self.module)


class HandsOn(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("norm", norm(pl_module.head))


class AsksForAll(Callback):
    def on_train_epoch_end(self, *arguments: Any) -> None:
        print(arguments[1].weight)


class Calls(Callback):
    def on_train_epoch_end(self, *_: Any) -> None:
        elsewhere()


class Lists(Callback):
    def on_train_epoch_end(self, *_: Any) -> None:
        print(KEEPS[0])


class Collects(Callback):
    def on_train_epoch_end(self, *_: Any) -> None:
        print(gc.get_objects())


class Inherits(Keeps):
    pass


class TakesOptimizer(Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        print(optimizer.param_groups)


class TakesOutputs(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        print(outputs["weight"])


class Aliases(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        module = trainer.lightning_module
        print(module.head)


class Parents(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *_)


class HoldsInClass(Callback):
    models = KEEPS

    def on_train_batch_end(self, *_: Any) -> None:
        print(self.models)


class AsksForLocals(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        print(locals()["pl_module"].head)


def looking(function: Any) -> Any:
    @functools.wraps(function)
    def looks(self: Any, trainer: Any, pl_module: Any, *arguments: Any) -> Any:
        print(pl_module.head)
        return function(self, trainer, pl_module, *arguments)

    return looks


class Decorated(Callback):
    @looking
    def on_train_batch_end(self, *_: Any) -> None:
        print("through")


class OfLightnings(ModelCheckpoint):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        print(pl_module.head)


def made_here() -> Callback:
    kept = nn.Linear(2, 2)

    class Closes(Callback):
        def on_train_epoch_end(self, *_: Any) -> None:
            print(kept)

    return Closes()


def written() -> Callback:
    names: dict[str, Any] = {}
    exec("def on_train_epoch_end(self, trainer, pl_module): print(pl_module.head)", names)
    return type("Written", (Callback,), {"on_train_epoch_end": names["on_train_epoch_end"]})()


@pytest.mark.parametrize("callback", [Times(), Stopwatch(3)], ids=lambda each: type(each).__name__)
def test_callbacks_that_count_and_log_are_blind(callback: Callback) -> None:
    assert is_blind(callback)


@pytest.mark.parametrize(
    "callback",
    [
        *(Holds(), Keeps(), HandsOn(), AsksForAll(), Calls(), Lists(), Collects(), Inherits(), TakesOptimizer()),
        *(TakesOutputs(), Aliases(), Parents(), made_here(), written()),
        *(HoldsInClass(), AsksForLocals(), Decorated(), OfLightnings()),
    ],
    ids=lambda each: type(each).__name__,
)
def test_callbacks_that_could_come_to_weights_are_not(callback: Callback) -> None:
    assert not is_blind(callback)


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.rate, self.seen = nn.Linear(2, 2), 0.5, [torch.zeros(1)]

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("rate", self.rate)
        self.aside = self.trainer.current_epoch
        self.half()

    def half(self) -> None:
        self.log("half", self.rate / 2)

    def on_train_batch_start(self, *_: Any) -> None:
        self.log("norm", self.head.weight.norm())

    def on_train_epoch_start(self) -> None:
        self.of_all()

    def of_all(self) -> None:
        print(sum(p.norm() for p in self.parameters()))

    def on_train_epoch_end(self) -> None:
        print(self.seen[0])

    def on_validation_end(self) -> None:
        norm(self)

    def on_validation_start(self) -> None:
        getattr(self, "head")  # noqa: B009


def test_hooks_of_a_module_are_read_one_by_one_with_the_methods_they_call() -> None:
    hooks = ["on_train_batch_end", "on_train_batch_start", "on_train_epoch_start", "on_train_epoch_end"]
    hooks += ["on_validation_end", "on_validation_start"]
    assert [hook_is_blind(Module(), hook) for hook in hooks] == [True] + [False] * 5
