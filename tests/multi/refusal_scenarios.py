"""Things that a pipeline cannot do, each as a user would write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from tests.harness import RankInfo
from tests.parity.scenario import trainer_for
from tests.parity.train import make_trainer
from tests.parity.zoo.blocks import HIDDEN, Block
from tests.parity.zoo.data import VOCABULARY
from tests.parity.zoo.language import LearnedPositions
from tests.parity.zoo.tasks import TokenTask


class Manual(TokenTask):
    """Drives its optimizer by hand."""

    def __init__(self) -> None:
        super().__init__(LearnedPositions())
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class TwoOptimizers(Manual):
    """Two optimizers, by hand, as Lightning demands."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        halves = [self.net.layers.parameters(), self.net.final_norm.parameters()]
        return [torch.optim.SGD(half, lr=0.1) for half in halves]


class Twice(TokenTask):
    """Calls the trunk two times."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + super().loss(batch)


class Never(TokenTask):
    """Has a trunk and does not call it."""

    def loss(self, batch: Any) -> Tensor:
        return self.net.final_norm(self.net.token_embedding(batch[0])).square().mean()


class Trunkless(nn.Module):
    """No repeated layers anywhere, but lists that are not a trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.activations = nn.ModuleList([nn.GELU(), nn.Tanh()])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


class HalfTrunk(LearnedPositions):
    """Skips the second half of its layers."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens)
        for layer in self.layers[: len(self.layers) // 2]:
            x = layer(x)
        return torch.nn.functional.linear(self.final_norm(x), self.token_embedding.weight)


class SharedLayer(nn.Module):
    """One layer object listed four times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList([Block()] * 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


MODULES: dict[str, Callable[[], Any]] = {
    "manual": Manual,
    "two_optimizers": TwoOptimizers,
    "twice": lambda: Twice(LearnedPositions()),
    "never": lambda: Never(LearnedPositions()),
    "trunkless": lambda: TokenTask(Trunkless()),
    "half": lambda: TokenTask(HalfTrunk()),
    "shared": lambda: TokenTask(SharedLayer()),
    "short": lambda: TokenTask(LearnedPositions(layers=2)),
    "plain": lambda: TokenTask(LearnedPositions()),
}


def fit(info: RankInfo, layout: tuple[int, int], arguments: dict[str, Any], module: str, options: str = "") -> None:
    """Fits ``module``; ``options`` names Trainer callbacks that do not fit."""
    callbacks = {"swa": [StochasticWeightAveraging(1e-3)], "": []}[options]
    trainer = trainer_for(info, layout, arguments, max_epochs=1, callbacks=callbacks)
    trainer.fit(MODULES[module]())


def strategy_with(info: RankInfo, arguments: dict[str, Any]) -> None:
    """Only builds strategy and Trainer, then fits an ordinary module."""
    from lightning_megatron import MegatronStrategy

    trainer = make_trainer(info, MegatronStrategy(**arguments), max_epochs=1)
    trainer.fit(MODULES["plain"]())


class Shuffled(TokenTask):
    """Each rank shuffles by its own rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(LearnedPositions())
        self.rank = rank

    def train_dataloader(self) -> Any:
        loader: Any = super().train_dataloader()
        order = torch.randperm(len(loader.dataset), generator=torch.Generator().manual_seed(self.rank)).tolist()
        subset: Any = Subset(loader.dataset, order)
        return DataLoader(subset, batch_size=loader.batch_size, collate_fn=loader.collate_fn)


def unequal_batches(info: RankInfo, layout: tuple[int, int]) -> None:
    """Stages of one replica load different batches."""
    trainer_for(info, layout, {}, max_epochs=1).fit(Shuffled(info.rank))


def old_callback(info: RankInfo) -> None:
    """A callback of the ``pytorch_lightning`` namespace, which Lightning would call as if it were its own."""
    import pytorch_lightning

    callback: Any = pytorch_lightning.callbacks.LearningRateMonitor()
    trainer_for(info, (2, 1), {}, max_epochs=1, callbacks=[callback]).fit(MODULES["plain"]())


def old_trainer(info: RankInfo) -> None:
    """The strategy in a Trainer of the ``pytorch_lightning`` namespace."""
    import pytorch_lightning

    from lightning_megatron import MegatronStrategy

    pytorch_lightning.Trainer(strategy=MegatronStrategy(), accelerator="cpu", devices=2, logger=False)
