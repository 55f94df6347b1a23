"""Hooks of the user on layers that tensor-parallel ranks split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trainer_for
from tests.parity.zoo.loops import Walker
from tests.parity.zoo.tasks import TokenTask


def louder(layer: nn.Linear, inputs: Any, output: Tensor) -> Tensor:
    return output * (1 + layer.weight.abs().mean())


def centred(layer: nn.Linear, inputs: Any, output: Tensor) -> Tensor:
    return output - output.mean(-1, keepdim=True)


def shaped(layer: nn.Linear, inputs: Any, output: Tensor) -> Tensor:
    return output.to(layer.weight.dtype) * (1 + 1 / layer.weight.shape[0])


def around(mlp: nn.Sequential, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0] * (1 + mlp[0].weight.norm()),)  # type: ignore[operator]


def back(mlp: nn.Sequential, into: tuple[Tensor], out: Any) -> tuple[Tensor]:
    return (into[0] * (1 + mlp[0].weight.detach().norm()),)  # type: ignore[operator]


class Hooks(Callback):
    """Registers hooks in one of its own hooks."""

    def __init__(self, register: Callable[[nn.Module], Any]) -> None:
        self.register = register

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        for block in pl_module.net.blocks:  # type: ignore[union-attr]
            self.register(block.mlp)  # type: ignore[union-attr]


class InStep(TokenTask):
    """Registers a hook for one call."""

    def __init__(self) -> None:
        super().__init__(Walker())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        handle = self.net.blocks[1].mlp[1].register_forward_hook(centred)
        loss = self.loss(batch)
        handle.remove()
        return loss


LATE: Mapping[str, Callable[[Any], Any]] = {
    "late": lambda mlp: mlp[0].register_forward_hook(louder),
    "late pre": lambda mlp: mlp[2].register_forward_pre_hook(lambda _, inputs: (inputs[0] / inputs[0].norm(),)),
    "late backward": lambda mlp: mlp[0].register_full_backward_hook(lambda *_: None),
    "removed": lambda mlp: mlp[0].register_forward_hook(louder).remove(),
    "around": lambda mlp: mlp.register_forward_pre_hook(around),
    "around, backward": lambda mlp: mlp.register_full_backward_hook(back),
}
EARLY: Mapping[str, Callable[[Any], Any]] = {
    "reads": lambda mlp: mlp[0].register_forward_hook(louder),
    "centred": lambda mlp: mlp[0].register_forward_hook(centred),
    "shaped": lambda mlp: mlp[0].register_forward_hook(shaped),
}


class Watched(TokenTask):
    """Hooks that the constructor registers keep numbers of activations elsewhere, without their graph, for a log."""

    def __init__(self) -> None:
        super().__init__(Walker())
        self.seen: dict[str, Tensor] = {}
        for index, block in enumerate(self.net.blocks):
            block.mlp[0].register_forward_hook(self._keep(f"output {index}"))
            block.mlp[2].register_forward_pre_hook(lambda _, given, at=index: self._put(f"input {at}", given[0]))

    def _put(self, name: str, activation: Tensor) -> None:
        self.seen[name] = activation.detach().square().mean()

    def _keep(self, name: str) -> Callable[..., None]:
        return lambda layer, given, output: self._put(name, output)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log_dict(dict(self.seen))
        return loss


def watched(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> dict[str, float]:
    """Numbers that hooks on layers have kept in the last step, as they are logged."""
    torch.manual_seed(7)
    trainer = trainer_for(info, layout, arguments, max_epochs=1, limit_val_batches=0)
    trainer.fit(Watched())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def run(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """All weights after a few steps; on the first rank."""
    torch.manual_seed(7)
    module = InStep() if kind == "in a step" else TokenTask(Walker())
    for block in module.net.blocks if kind in EARLY else ():
        EARLY[kind](block.mlp)
    callbacks = [Hooks(LATE[kind])] if kind in LATE else []
    trainer = trainer_for(info, layout, arguments, max_epochs=1, limit_val_batches=0, callbacks=callbacks)
    trainer.fit(module)
    state = trainer.strategy.full_state_dict() if layout is not None else module.state_dict()
    return {name: value.double().clone() for name, value in state.items() if info.rank == 0}
