"""Hooks that look at the states of optimizers and of the module, and hooks around an optimizer's step."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.optim import Optimizer

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trainer_for
from tests.parity.zoo.loops import Walker
from tests.parity.zoo.tasks import TokenTask


def square(tensor: Tensor) -> float:
    return float(tensor.detach().square().sum())


class Kept(TokenTask):
    """A network trained by Adam; hooks keep what they see."""

    def __init__(self) -> None:
        super().__init__(Walker())
        self.__dict__["kept"] = []

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class ReadsState(Kept):
    """Reads all of the state, each entry by its parameter, and as ``state_dict`` numbers them."""

    def on_train_batch_end(self, *args: Any) -> None:
        state, whole = self.trainer.optimizers[0].state, self.optimizers().state_dict()
        self.kept.append([len(state), [square(state[p]["exp_avg"]) for p in self.parameters()]])
        self.kept.append([[entries["exp_avg_sq"].shape, float(entries["step"])] for entries in state.values()])
        self.kept.append({key: square(entries["exp_avg"]) for key, entries in whole["state"].items()})


class WritesState(Kept):
    """Scales it by a norm, puts other tensors in its place, forgets it, and takes back what it had copied."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.trainer.optimizers[0]
        if batch_idx == 1:
            self.__dict__["copied"] = copy.deepcopy(optimizer.state_dict())
            for state in optimizer.state.values():
                state["exp_avg"] = state["exp_avg"] / (1 + state["exp_avg"].norm())
                state["exp_avg_sq"].mul_(2).add_(state["exp_avg_sq"].mean())
        elif batch_idx == 2:
            optimizer.state.clear()
        elif batch_idx == 3:
            optimizer.load_state_dict(self.__dict__["copied"])


class Monitor(Callback):
    """Reads it on one rank alone, and keeps one tensor of it from one batch to the next."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        state = trainer.optimizers[0].state
        if trainer.is_global_zero:
            norm = math.sqrt(sum(square(entries["exp_avg"]) for entries in state.values()))
            pl_module.__dict__["alone"] = norm
        self.first = getattr(self, "first", None) or [entries["exp_avg"] for entries in state.values()]
        pl_module.__dict__["kept"].append([square(moment) for moment in self.first])


class Watched(Kept):
    def configure_callbacks(self) -> list[Callback]:
        return [Monitor()]


class ByHook(Kept):
    """Learning rates that go by a norm of gradients, and a bound on that of each weight, around each step."""

    def configure_optimizers(self) -> Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_step_post_hook(lambda optimizer, *_: self.bound(optimizer))
        return optimizer

    def on_train_start(self) -> None:
        self.trainer.optimizers[0].register_step_pre_hook(self.before)

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = math.sqrt(sum(square(p.grad) for p in parameters if p.grad is not None))
        self.kept.append([len(parameters), norm])
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + norm)

    @torch.no_grad()
    def bound(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.div_(parameter.norm().clamp(min=1.0))
        self.kept.append([square(p) for group in optimizer.param_groups for p in group["params"]])


class Listed(Kept):
    """Goes over ``state_dict``, keeps names, and averages what it lists."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[0].register_buffer("count", torch.ones(2))

    def on_train_start(self) -> None:
        self.__dict__["decayed"] = {name for name, parameter in self.named_parameters() if parameter.ndim > 1}
        self.__dict__["mean"] = {name: value.clone() for name, value in self.state_dict().items()}

    def on_train_batch_end(self, *args: Any) -> None:
        state, mean = self.state_dict(), self.__dict__["mean"]
        for name, value in state.items():
            mean[name].mul_(0.9).add_(value, alpha=0.1)
        self.kept.append([list(state), [square(mean[name]) for name in state], len(list(self.buffers()))])
        self.kept.append([name in self.__dict__["decayed"] for name, _ in self.named_parameters()])
        self.kept.append(float(sum(buffer.sum() for buffer in self.buffers())))


class SavedLater(Kept):
    """Reads weights, states and their names where a checkpoint is made, also after the fit."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        moments = [square(state["exp_avg"]) for state in self.trainer.optimizers[0].state.values()]
        self.kept.append([sum(moments), [square(value) for value in self.state_dict().values()]])


class Drawn(Logger):
    """Draws the module, of which it counts the parameters."""

    name, version = "drawn", 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        pass

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_graph(self, model: LightningModule, input_array: Tensor | None = None) -> None:  # type: ignore[override]
        model.__dict__["kept"].append([(name, parameter.numel()) for name, parameter in model.named_parameters()])


class Graphed(Kept):
    """Is drawn by a logger."""


KINDS: dict[str, type[Kept]] = {
    kind.__name__: kind for kind in (ReadsState, WritesState, Watched, ByHook, Listed, SavedLater, Graphed)
}


def run(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """What hooks have kept, and on rank 0 all weights, after an epoch."""
    torch.manual_seed(7)
    logger = Drawn() if kind == "Graphed" else False
    trainer = trainer_for(info, layout, arguments, max_epochs=1, limit_val_batches=0, logger=logger)
    module = KINDS[kind]()
    trainer.fit(module)
    if kind == "SavedLater":
        trainer._checkpoint_connector.dump_checkpoint()
    state = trainer.strategy.full_state_dict() if layout is not None else module.state_dict()  # type: ignore[attr-defined]
    found: dict[str, Any] = {"kept": list(module.__dict__["kept"]), "alone": module.__dict__.get("alone")}
    return found | ({name: value.double().clone() for name, value in state.items()} if info.rank == 0 else {})
