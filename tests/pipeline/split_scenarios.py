"""Counts what a split backward does in a whole Trainer: which products it puts off, how often user code runs."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_megatron.pipeline.run.executor import PipelineExecutor
from lightning_megatron.pipeline.stage.stage import Stage
from tests.harness import RankInfo
from tests.parity.scenario import trainer_for
from tests.parity.zoo.huggingface import PretrainedTask
from tests.parity.zoo.language import NanoGPT, TorchLayers
from tests.parity.zoo.tasks import MaskedTask, OwnLossTask

MICRO_BATCHES = 4


class Counted(torch.autograd.Function):
    """Identity of a user who counts its backwards."""

    backwards = itertools.count()  # a number that a backward writes would keep batches whole

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        next(Counted.backwards)
        return grad


class Counters(Callback):
    """Counts the forwards of the layers that this rank owns, and runs a function of the user's own behind each."""

    def __init__(self) -> None:
        self.forwards: dict[str, itertools.count[int]] = {}  # numbers would be put back after a recomputation

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        stage = Stage.of(pl_module)
        assert stage is not None
        for name in stage.presence.layers_here():
            self.forwards[name] = itertools.count()
            layer = pl_module.get_submodule(name)
            _, linear, *_ = (child for child in layer.modules() if is_linear(child))
            tensor = trainer.strategy.mesh.layout.tensor  # type: ignore[attr-defined]
            whole = layer if tensor > 1 else linear  # hooks this late go on what is not split
            whole.register_forward_hook(lambda *args, name=name: self._count(name, args[-1]))

    def _count(self, name: str, output: Any) -> Any:
        if isinstance(output, tuple):
            return self._count(name, output[0]), *output[1:]
        if not torch.is_grad_enabled():  # another chunk of this stage asks for shapes
            return output
        next(self.forwards[name])
        return Counted.apply(output)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear of whatever kind."""
    return isinstance(module, (nn.Linear, Conv1D))


def build(model: str) -> LightningModule:
    """Four layers."""
    if model == "nano":
        return OwnLossTask(NanoGPT(4))
    return MaskedTask(TorchLayers(4)) if model == "torch" else PretrainedTask(model, labels=True)


def counted(info: RankInfo, model: str, tensor: int, schedule: str, recompute: Any) -> dict[str, Any]:
    """One batch of four micro-batches."""
    counters = Counters()
    trainer = trainer_for(
        info,
        (2, 1),
        {
            "micro_batch_size": 2,
            "whole_batch_loss": False,
            "tensor_parallel_size": tensor,
            "pipeline_schedule": schedule,
            "activation_recompute": recompute,
        },
        max_steps=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        callbacks=[counters],
    )
    torch.manual_seed(1)
    module, queues, early = build(model), [], set()
    original = PipelineExecutor._backward_input

    def gradients(self: PipelineExecutor, virtual: int) -> dict[str, float | None]:
        """A number that changes with the gradient, per linear of a virtual stage."""
        start, stop = self.stage.partition.bounds[virtual]
        layers = {n: self.stage.module.get_submodule(n) for n in self.stage.partition.trunk.layer_names[start:stop]}
        linears = {f"{n}.{i}": c for n, layer in layers.items() for i, c in layer.named_modules() if is_linear(c)}
        return {n: None if c.weight.grad is None else float(c.weight.grad.norm()) for n, c in linears.items()}

    def watched(self: PipelineExecutor, slot: Any) -> None:
        before = gradients(self, slot.virtual)
        original(self, slot)
        queues.append((slot.virtual, len(self._factors[slot.place])))
        after = gradients(self, slot.virtual)
        early.update(name for name in after if after[name] != before[name])

    Counted.backwards = itertools.count()
    with mock.patch.object(PipelineExecutor, "_backward_input", watched):
        trainer.fit(module)
    layers = [stop - start for start, stop in trainer.strategy.partition.bounds]  # type: ignore[attr-defined]
    return {
        "per_layer": sorted({count / layers[virtual] for virtual, count in queues}),
        "stage": trainer.strategy.mesh.stage,  # type: ignore[attr-defined]
        "early": sorted(early),
        "forwards": {name: next(count) for name, count in counters.forwards.items()},
        "backwards": next(Counted.backwards),
    }
