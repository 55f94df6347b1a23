"""Counts what a rank really holds: parameters after setup, activations during the schedule."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from tests.harness import RankInfo
from tests.harness.memory import live_storages
from tests.parity.scenario import trainer_for
from tests.parity.zoo.blocks import Block
from tests.parity.zoo.data import VOCABULARY
from tests.parity.zoo.huggingface import PretrainedTask, build_model
from tests.parity.zoo.tasks import TokenTask

WIDE = 32


class WideNet(nn.Module):
    """Layers that are most of the module, all alike."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDE), nn.Linear(WIDE, VOCABULARY)
        self.layers = nn.ModuleList([Block(WIDE) for _ in range(layers)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Packed:
    """What the saved-tensors hook stores instead of a tensor, so that its life can be watched.

    Detached: an operation that saves its own result would otherwise hold itself, until a backward that a trial lacks.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


class CountSaved(Callback):
    """Counts live saved activations while batches train.

    Attributes:
        most: the largest number of bytes alive at once.
        per_micro_batch: bytes that one micro-batch's forward saves.
        left: bytes still alive after the batch.
    """

    def __init__(self) -> None:
        self.live: weakref.WeakSet[Packed] = weakref.WeakSet()
        self.bytes_alive, self.most, self.total, self.left, self.batches = 0, 0, 0, 0, 0
        self.parameters: set[int] = set()

    def _pack(self, tensor: Tensor) -> Packed:
        packed, size = Packed(tensor), 0 if tensor.data_ptr() in self.parameters else tensor.nbytes
        self.bytes_alive += size
        self.total += size
        self.most = max(self.most, self.bytes_alive)
        weakref.finalize(packed, self._free, size)
        return packed

    def _free(self, size: int) -> None:
        self.bytes_alive -= size

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.parameters = {parameter.data_ptr() for parameter in pl_module.parameters()}
        self.context = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed.tensor)
        self.context.__enter__()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.context.__exit__(None, None, None)
        self.batches += 1
        self.left = self.bytes_alive


def activations(
    info: RankInfo, stages: int, micro_batches: int, schedule: str, trial: bool | str = False
) -> dict[str, float]:
    """Trains two batches of ``micro_batches`` samples, one sample per micro-batch; ``trial``: of the loss."""
    counter = CountSaved()
    trainer = trainer_for(
        info,
        (stages, 1),
        {"micro_batch_size": 1, "pipeline_schedule": schedule, "whole_batch_loss": trial},
        max_steps=2,
        limit_val_batches=0,
        callbacks=[counter],
    )
    torch.manual_seed(1)
    trainer.fit(TokenTask(WideNet(2 * stages)))
    one = counter.total / counter.batches / micro_batches
    return {"in_flight": counter.most / one, "left": counter.left, "one": one}


class HeldAtStart(Callback):
    """Measures all tensors that the process holds when training starts, beside those of earlier runs in it."""

    def __init__(self) -> None:
        self.before = live_storages()  # kept, so that no address is given out again

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.tensor_bytes = sum(found.nbytes() for place, found in live_storages().items() if place not in self.before)
        own = type(pl_module).named_parameters  # the module's lists those of all stages in a hook that counts them
        self.owned = sum(parameter.numel() for _, parameter in own(pl_module))
        self.names = [name for name, _ in own(pl_module, remove_duplicate=False)]


def held(info: RankInfo, stages: int) -> dict[str, Any]:
    """What a rank holds after setup: parameter elements, their names, bytes of every live tensor."""
    meter = HeldAtStart()
    torch.manual_seed(1)
    module = TokenTask(WideNet(8))
    whole = sum(parameter.numel() for parameter in module.parameters())
    trainer = trainer_for(info, (stages, 1), {}, max_steps=1, limit_val_batches=0, callbacks=[meter])
    trainer.fit(module)
    return {"whole": whole, "owned": meter.owned, "bytes": meter.tensor_bytes, "names": meter.names}


class LateBuilt(TokenTask):
    """Builds its network in ``configure_model`` on the meta device, as large models do."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = WideNet(8)


def late_built(info: RankInfo, layout: tuple[int, int]) -> dict[str, Tensor]:
    """Initial weights by name, as this rank holds them when training starts."""
    weights: dict[str, Tensor] = {}

    class Copy(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            here = (each for each in pl_module.named_parameters() if isinstance(each[1], nn.Parameter))
            weights.update({name: value.detach().clone() for name, value in here})

    torch.manual_seed(1)
    trainer = trainer_for(info, layout, {}, max_steps=1, limit_val_batches=0, callbacks=[Copy()])
    trainer.fit(LateBuilt())
    return weights


class LatePretrained(PretrainedTask):
    """A Hugging Face model built on the meta device."""

    def __init__(self, name: str) -> None:
        super(PretrainedTask, self).__init__()
        self.save_hyperparameters({"name": name, "labels": True, "encoded": False})
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = build_model(self.hparams.name)


def late_pretrained(info: RankInfo, layout: tuple[int, int], name: str) -> dict[str, float]:
    """Metrics after two epochs of a Hugging Face model that was never built whole."""
    torch.manual_seed(1)
    trainer = trainer_for(info, layout, {}, max_epochs=2)
    trainer.fit(LatePretrained(name))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}
