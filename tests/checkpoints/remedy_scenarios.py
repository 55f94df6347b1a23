"""Runs whose checkpoint does not fit them, each beside what the message tells its author to write instead."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronCheckpointIO, MegatronStrategy
from tests.harness import RankInfo, ReusedProcesses
from tests.parity.train import make_trainer
from tests.strategy.remedy_scenarios import TOKENS, WORDS, Task

STAGES, REPLICAS = {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}


class Named:
    """A choice of the user's own class."""

    def __init__(self, name: str) -> None:
        self.name = name


class Chosen(Task):
    """Keeps an object of such a class among its hyperparameters."""

    def __init__(self, choice: Named | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()


class Grouped(Task):
    def configure_optimizers(self) -> Any:
        groups = [{"params": self.layers.parameters()}, {"params": [*self.embed.parameters(), *self.head.parameters()]}]
        return torch.optim.SGD(groups, lr=0.1)


class Adam(Task):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Inside(Adam):
    """Its layers lie a level deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleDict({"layers": self.layers})
        del self.layers

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in self.trunk["layers"]:  # type: ignore[union-attr]
            x = layer(x)
        return self.head(x)


class Larger(Adam):
    """Has one tensor more."""

    strict = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WORDS).double())
        self.strict_loading = self.strict

    def forward(self, tokens: Any) -> Any:
        return super().forward(tokens) * self.scale


class Lenient(Larger):
    strict = False


class InBatches(Task):
    """Reads 24 samples of an epoch in two steps of 2 replicas, and then in other batches."""

    size = 6

    def train_dataloader(self) -> DataLoader[Any]:
        words = torch.randint(0, WORDS, (48, TOKENS + 1), generator=torch.Generator().manual_seed(5))
        return DataLoader(TensorDataset(words[:, :-1].contiguous(), words[:, 1:].contiguous()), batch_size=self.size)


class OddBatches(InBatches):
    size = 5


class EvenBatches(InBatches):
    size = 4


AFRESH = {"load_optimizer": False}
MOVED = {"prefixes": {"layers.": "trunk.layers."}}
MISFITS: dict[str, tuple[str, Any, Any, Any, dict[str, Any], dict[str, Any]]] = {
    # words of the message, the module that is saved, that which does not fit, that which is advised, the layout, and
    # arguments of MegatronCheckpointIO that are advised
    "other groups": ("MegatronCheckpointIO(load_optimizer=False)", Task, Grouped, Grouped, STAGES, AFRESH),
    "another optimizer": ("MegatronCheckpointIO(load_optimizer=False)", Task, Adam, Adam, STAGES, AFRESH),
    "other names": ("prefixes={'old.': 'new.'}", Adam, Inside, Inside, STAGES, MOVED),
    "another tensor": ("set `strict_loading = False`", Adam, Larger, Lenient, STAGES, {}),
    "a pickled object": ("weights_only=False", Chosen, Chosen, Chosen, STAGES, {"weights_only": False}),
    "other batches": ("for instance `batch_size=4`", InBatches, OddBatches, EvenBatches, REPLICAS, {}),
}


def _trainer(info: RankInfo, misfit: str, steps: int, **io: Any) -> Any:
    plugins = [ReusedProcesses(info), MegatronCheckpointIO(**io)]
    return make_trainer(
        info, MegatronStrategy(**MISFITS[misfit][4]), max_steps=steps, plugins=plugins, use_distributed_sampler=True
    )


def writes(info: RankInfo, misfit: str, path: str) -> None:
    """A checkpoint after two steps."""
    saved = MISFITS[misfit][1]
    trainer = _trainer(info, misfit, 2, weights_only=False)
    trainer.fit(saved(Named("a")) if saved is Chosen else saved())
    trainer.save_checkpoint(path)


def resumes(info: RankInfo, misfit: str, path: str, advised: bool) -> int:
    """Steps after going on for two: with a module that does not fit, or as its message says."""
    _, _, unfit, fit, _, io = MISFITS[misfit]
    kind = fit if advised else unfit
    warnings.filterwarnings("ignore", message=".* fits Lenient in part: missing .'scale'.")  # as it was told to
    trainer = _trainer(info, misfit, 4, **(io if advised else {}))
    trainer.fit(kind(Named("b")) if kind is Chosen else kind(), ckpt_path=path)
    steps: int = trainer.global_step
    return steps


class Keeper(Callback):
    """Keeps tensors in an object of its own, which a checkpoint holds."""

    def state_dict(self) -> dict[str, Any]:
        return {"kept": Box(torch.ones(3))}


class Box:
    def __init__(self, content: Any) -> None:
        self.content = content


def keeps(info: RankInfo, path: str) -> None:
    """A checkpoint with such a callback."""
    trainer = make_trainer(info, MegatronStrategy(), max_steps=1, callbacks=[Keeper()])
    trainer.strategy.checkpoint_io = MegatronCheckpointIO(weights_only=False)
    trainer.fit(Task())
    trainer.save_checkpoint(path)
