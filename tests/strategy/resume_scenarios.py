"""Stops runs at awkward steps and goes on, with loaders of every kind, dropout, and randomness in the data set."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.mesh.messages import objects
from tests.harness import RankInfo
from tests.parity.train import make_trainer
from tests.strategy.loader_kinds import BATCH, KINDS, SAMPLES, Numbered

EPOCHS = 3
STEPS = SAMPLES // BATCH * EPOCHS
STOPS = (2, 5, 7)  # in the first epoch, at its end, in the second


class Counting(DataLoader[Tensor]):
    """A loader that can resume by itself: remembers which replica it is, to show that each gets its own state back."""

    def __init__(self, replica: int) -> None:
        super().__init__(Numbered(False), batch_size=BATCH)
        self.replica, self.given = replica, 0
        self.skip = 0

    def __iter__(self) -> Any:
        skip, self.skip, self.given = self.skip, 0, self.skip
        for number, batch in enumerate(super().__iter__()):
            if number >= skip:
                self.given += 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given, "replica": self.replica}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state["replica"] == self.replica, state
        self.skip = state["given"] % (SAMPLES // BATCH)


class Noisy(LightningModule):
    """Four layers with dropout; remembers the samples that it was trained on."""

    def __init__(self, loader: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.loader = loader
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Dropout(0.3)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["a"].mean(0) + batch["b"] if isinstance(batch, dict) else batch
        return self(x / SAMPLES).square().mean()

    def train_dataloader(self) -> Any:
        if self.loader == "own":
            return Counting(self.trainer.strategy.mesh.coordinates.data)  # type: ignore[attr-defined]
        return KINDS[self.loader]()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Diary(Callback):
    """Notes samples and loss of every step, and saves after some of them."""

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self.entries: list[tuple[list[float], float]] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, *_: Any) -> None:
        tensors = list(batch.values()) if isinstance(batch, dict) else [batch]
        self.entries.append(([float(v) for t in tensors for v in t.flatten()], float(outputs["loss"])))
        if self.folder is not None and trainer.global_step in STOPS:
            trainer.save_checkpoint(f"{self.folder}/step{trainer.global_step}.ckpt")


def _fit(info: RankInfo, loader: str, sizes: tuple[int, int], path: str | None, diary: Diary) -> None:
    trainer = make_trainer(
        info, MegatronStrategy(*sizes, micro_batch_size=2), max_epochs=EPOCHS, callbacks=[diary], num_sanity_val_steps=0
    )
    module = Noisy(loader)
    seed = 6 if path is None else 9
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    trainer.fit(module, ckpt_path=path)


def stopped_and_resumed(info: RankInfo, loader: str, pipeline: int, data: int) -> list[str]:
    """What differs between an undisturbed run and those that were resumed; nothing should."""
    whole = Diary(info.directory)
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than this machine has cores
    _fit(info, loader, (pipeline, data), None, whole)
    steps = 18 if "stream in" in loader else STEPS  # each worker has half a batch left over
    found = [] if len(whole.entries) == steps else [f"{len(whole.entries)} steps"]
    for stop in STOPS:
        rest, wanted = Diary(), whole.entries[stop:]
        _fit(info, loader, (pipeline, data), f"{info.directory}/step{stop}.ckpt", rest)
        if len(rest.entries) != len(wanted):
            found.append(f"stopped after {stop}: {len(rest.entries)} steps instead of {len(wanted)}")
        pairs = enumerate(zip(rest.entries, wanted, strict=False))
        found += [f"stopped after {stop}, step {i}: {got}, not {want}" for i, (got, want) in pairs if got != want][:1]
    return found


class Ordered(Noisy):
    """Without dropout; reads in the order of a loader that Lightning may put its sampler into."""

    def __init__(self, shuffle: bool, batch: int) -> None:
        super().__init__("")
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.shuffle, self.batch = shuffle, batch

    def train_dataloader(self) -> Any:
        return DataLoader(Numbered(False), batch_size=self.batch, shuffle=self.shuffle)


def samples_of(
    info: RankInfo, shuffle: bool, replicas: int, path: str | None, saves: str | None = None
) -> list[list[float]]:
    """What all replicas together read in each step, sorted; ``saves`` in the middle of the first epoch."""
    diary = Diary(saves)
    options = {"use_distributed_sampler": True, "num_sanity_val_steps": 0}
    trainer = make_trainer(info, MegatronStrategy(1, replicas), max_epochs=EPOCHS, callbacks=[diary], **options)
    torch.manual_seed(6 if path is None else 9)
    trainer.fit(Ordered(shuffle, BATCH // replicas), ckpt_path=path)
    everyone = objects.gather([samples for samples, _ in diary.entries])
    return [sorted(each for rank in step for each in rank) for step in zip(*everyone, strict=True)]
