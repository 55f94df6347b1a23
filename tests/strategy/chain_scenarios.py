"""A run that is stopped and resumed time and again, at the end of an epoch and after it, tells one story."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from lightning_megatron import MegatronStrategy
from tests.harness import RankInfo
from tests.parity.train import make_trainer
from tests.strategy.loader_kinds import BATCH, KINDS, SAMPLES, Numbered
from tests.strategy.resume_scenarios import EPOCHS


@dataclass(frozen=True)
class Chain:
    """What is stopped and resumed.

    Attributes:
        loader: ``"ordered"``, ``"shuffled"``, ``"packed"``, or one of ``loader_kinds.KINDS``.
        hook: where checkpoints are saved.
        stops: optimizer steps to save at; each run but the first goes on from the one before.
        accumulate: batches per optimizer step.
        interval: batches between validations; after the epoch's last one if ``None``.
        limit: whether ``max_steps`` ends runs right after they have saved, and not ``max_epochs``.
    """

    loader: str = "shuffled"
    hook: str = "on_train_batch_end"
    stops: tuple[int, ...] = (5, 8, 10)
    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    accumulate: int = 1
    limit: bool = False
    validates: bool = True
    interval: int | None = None

    @property
    def ranks(self) -> int:
        return self.pipeline * self.data * self.tensor


class Packs(Sampler[list[int]]):
    """Batches of samples whose lengths, 1 to 3, make at most 8; in another order every epoch."""

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in torch.randperm(SAMPLES).tolist():
            if sum(1 + i % 3 for i in [*batch, index]) > 8:
                yield batch
                batch = []
            batch.append(index)
        yield batch


class Storied(LightningModule):
    """Layers with dropout that a tensor plan can split."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.chain = chain
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2), nn.Dropout(0.3)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch / SAMPLES).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self(batch / SAMPLES).square().mean())

    def train_dataloader(self) -> Any:
        kind = self.chain.loader
        if kind == "packed":
            return DataLoader(Numbered(False), batch_sampler=Packs())
        if kind in KINDS:
            return KINDS[kind]()
        return DataLoader(Numbered(True), BATCH // self.chain.data, shuffle=kind != "ordered")

    def val_dataloader(self) -> Any:
        return DataLoader(Numbered(False), BATCH)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


class Story(Callback):
    """Writes down what happens, and where in it each checkpoint was saved."""

    def __init__(self, chain: Chain, folder: str, stops: tuple[int, ...]) -> None:
        self.chain, self.folder, self.stops = chain, folder, stops
        self.events: list[Any] = []
        self.saved: dict[int, int] = {}

    def _note(self, trainer: Trainer, hook: str, *event: Any) -> None:
        self.events.append((hook, trainer.current_epoch, trainer.global_step, *event))
        step = trainer.global_step
        if hook == self.chain.hook and step in self.stops and step not in self.saved:
            trainer.save_checkpoint(f"{self.folder}/step{step}.ckpt")
            self.saved[step] = len(self.events)

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        self._note(trainer, "on_train_epoch_start")

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self._note(trainer, "on_train_batch_end", batch_idx, batch.tolist(), float(outputs["loss"]), rate)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self._note(trainer, "on_validation_end", float(trainer.callback_metrics["val"]))

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self._note(trainer, "on_train_epoch_end")


def _fit(info: RankInfo, chain: Chain, story: Story, resumed_at: int | None, end: int) -> None:
    trainer = make_trainer(
        info,
        MegatronStrategy(chain.pipeline, chain.data, chain.tensor, micro_batch_size=1),
        **({"max_steps": end, "max_epochs": -1} if chain.limit else {"max_epochs": EPOCHS}),
        callbacks=[story],
        num_sanity_val_steps=0,
        limit_val_batches=1.0 if chain.validates else 0,
        use_distributed_sampler=chain.data > 1,
        accumulate_grad_batches=chain.accumulate,
        val_check_interval=chain.interval,
    )
    seed = 6 if resumed_at is None else 9 + resumed_at
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    trainer.fit(Storied(chain), ckpt_path=None if resumed_at is None else f"{info.directory}/step{resumed_at}.ckpt")


def chained(info: RankInfo, chain: Chain) -> list[str]:
    """Where the stories of resumed runs differ from that of an undisturbed one; nowhere, it is hoped."""
    whole, found = Story(chain, info.directory, chain.stops), []
    last = chain.stops[-1] + 2
    _fit(info, chain, whole, None, last)
    for number, stop in enumerate(chain.stops):
        after = chain.stops[number + 1 :][:1]
        story = Story(chain, info.directory, after)
        _fit(info, chain, story, stop, after[0] if after else last)
        wanted = whole.events[whole.saved[stop] :]
        if chain.limit and after:
            story.events, wanted = story.events[: story.saved[after[0]]], wanted[: story.saved[after[0]]]
        if story.events != wanted:
            pairs = enumerate(zip(story.events, wanted, strict=False))
            first = next((f"event {i} is {a}, not {b}" for i, (a, b) in pairs if a != b), "")
            found.append(f"resumed at {stop}: {len(story.events)} events, not {len(wanted)}; {first}")
    return found
