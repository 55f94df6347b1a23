"""Writes checkpoints for tests of the files themselves: a tied model, and a Hugging Face model, over 2 × 2 ranks."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import fsspec
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronCheckpointIO, MegatronStrategy, load_hf_weights
from lightning_megatron.checkpoints.files import storage
from lightning_megatron.strategy.memory.live_bytes import LiveBytes
from lightning_megatron.strategy.saving.model_state import ModelState
from lightning_megatron.strategy.saving.saving import Saving
from tests.checkpoints.reshard_scenarios import Losses, Tied, tensors_of
from tests.harness import RankInfo, ReusedProcesses
from tests.parity.train import make_trainer


def gpt2() -> Any:
    """A Hugging Face model of two layers; attention heads and vocabulary in odd numbers."""
    import transformers

    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=101, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


class HuggingFace(LightningModule):
    """Trains a Hugging Face model that it keeps under the name ``net``."""

    def __init__(self, rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(2)
        self.net = gpt2()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> DataLoader[Tensor]:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(torch.randint(0, 101, (16, 8), generator=generator), batch_size=4)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])


class Dangerous:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def trainer_of(info: RankInfo, steps: int = 2, sizes: tuple[int, int, int] = (2, 1, 2), **options: Any) -> Trainer:
    """Pipeline, data, tensor; float32, because Hugging Face models compute in it."""
    strategy = MegatronStrategy(*sizes, micro_batch_size=2)
    return make_trainer(info, strategy, max_steps=steps, precision="32-true", **options)


def write_both(info: RankInfo, folder: str) -> None:
    """``tied.ckpt`` and ``hf.ckpt``."""
    trainer = trainer_of(info, callbacks=[Losses()])
    trainer.fit(Tied(seed=4))
    trainer.save_checkpoint(f"{folder}/tied.ckpt")
    trainer = trainer_of(info)
    trainer.fit(HuggingFace(rate=3e-3))
    trainer.save_checkpoint(f"{folder}/hf.ckpt")


def resume_imported(info: RankInfo, path: str, sizes: tuple[int, int, int]) -> list[float]:
    """Losses after continuing from a checkpoint made by two steps."""
    losses = Losses()
    trainer = trainer_of(info, 4, sizes, callbacks=[losses])
    trainer.fit(Tied(seed=5), ckpt_path=path)
    return losses.values


def saved_before(info: RankInfo, path: str) -> None:
    """A checkpoint of a module that no run has seen."""
    trainer = trainer_of(info, 4, (1, info.world_size, 1))
    trainer.strategy.connect(Tied(seed=9))
    trainer.save_checkpoint(path)


def fresh_losses(info: RankInfo, sizes: tuple[int, int, int]) -> list[float]:
    """Losses of a run from the start."""
    losses = Losses()
    trainer_of(info, 4, sizes, callbacks=[losses]).fit(Tied(seed=9))
    return losses.values


class Keeps(Losses):
    """Keeps the dictionary that it is shown before a save."""

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint


def kept_by_a_hook(info: RankInfo, path: str, sizes: tuple[int, int, int]) -> list[str]:
    """What is in the dictionary that a hook has kept, after the save."""
    keeps = Keeps()
    trainer = trainer_of(info, 1, sizes, callbacks=[keeps])
    trainer.fit(Tied())
    trainer.save_checkpoint(path)
    return sorted(keeps.kept)


def last_of_a_remote_folder(info: RankInfo) -> dict[str, Any]:
    """Saves where folders have no time of change, and goes on from the last; old checkpoints are deleted there."""
    fsspec.filesystem("memory").mkdirs("/remote", exist_ok=True)
    for steps in (4, 6):
        saves = ModelCheckpoint("memory://remote", "{step}", every_n_train_steps=2, save_top_k=1, save_last=True)
        plugins = [ReusedProcesses(info), MegatronCheckpointIO(async_save=True)]
        trainer = trainer_of(info, steps, (1, 1, 1), callbacks=[saves], plugins=plugins, enable_checkpointing=True)
        trainer.fit(Tied(seed=5), ckpt_path="last" if steps > 4 else None)
    left = fsspec.filesystem("memory").ls("/remote", detail=False)
    batches = trainer.fit_loop.epoch_loop.batch_progress.total.ready
    return {"left": sorted(left), "batches": batches, "steps": trainer.global_step}


class Pretrained(HuggingFace):
    """Built without memory in ``configure_model``; a head of its own beside the pretrained model."""

    def __init__(self, path: str = "") -> None:
        LightningModule.__init__(self)
        self.path = path
        self.net: Any = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = gpt2()
                self.extra = torch.nn.Linear(3, 3)
            if self.path:
                load_hf_weights(self, self.path)


def read_bytes(info: RankInfo, path: str, sizes: tuple[int, int, int], through: str) -> tuple[int, dict[str, Tensor]]:
    """Bytes of weights read on this rank before the first step, and the whole state (on rank 0)."""
    read, reading = [0], storage._read

    def counting(file: Any, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        found = reading(file, start, shape, dtype)
        read[0] += found.nbytes
        return found

    options = {"initial_weights": path} if through == "strategy" else {}
    strategy = MegatronStrategy(*sizes, micro_batch_size=2, **options)
    trainer = make_trainer(info, strategy, max_steps=1, precision="32-true")
    module = Pretrained("" if options else path)
    with mock.patch.object(storage, "_read", counting):
        trainer.fit(module)
    return read[0], strategy.full_state_dict()


def partial(info: RankInfo, path: str, strict: bool) -> list[str]:
    """Loads ``tied.ckpt`` into a module with another name for its layers, and one more tensor."""
    import warnings

    class Other(Tied):
        def __init__(self) -> None:
            super().__init__(seed=6)
            self.blocks = self.layers
            del self.layers
            self.more = torch.nn.Parameter(torch.zeros(2))
            self.position = torch.nn.Parameter(torch.zeros(7, 12))
            self.strict_loading = strict

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens) + self.position[: tokens.shape[1]]
            for layer in self.blocks:
                x = layer(x)
            return self.head(self.norm(x)) * self.scale + self.more.sum()

    io = MegatronCheckpointIO(load_optimizer=False, prefixes={"layers.": "blocks."})
    strategy = MegatronStrategy(2, 1, 1, micro_batch_size=2, checkpoint_io=io)
    trainer = make_trainer(info, strategy, max_steps=2, precision="32-true")
    module = Other()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, ckpt_path=path)
        except RuntimeError as error:
            return [str(error)]
    state = strategy.full_state_dict()
    if not state:
        return []
    stored = tensors_of(path)
    moved = {"blocks." + name.removeprefix("layers."): name for name in stored if name.startswith("layers.")}
    assert moved and all(torch.equal(state[name], stored[first]) for name, first in moved.items())
    assert not trainer.optimizers[0].state
    return [str(each.message) for each in caught if "in part" in str(each.message)]


def resume_damaged(info: RankInfo) -> str:
    """Flips a bit of a weight that rank 1 wrote, and resumes; returns the error."""
    path = f"{info.directory}/run.ckpt"
    trainer = trainer_of(info, 1, (2, 1, 1))
    trainer.fit(Tied(seed=4))
    trainer.save_checkpoint(path)
    if info.rank == 0:
        with open(f"{path}/rank-00001.bin", "r+b") as file:
            file.seek(11)
            byte = file.read(1)[0]
            file.seek(11)
            file.write(bytes([byte ^ 0x40]))
    trainer.strategy.barrier()
    try:
        trainer_of(info, 2, (2, 1, 1)).fit(Tied(seed=5), ckpt_path=path)
    except RuntimeError as error:
        return str(error)
    return "resumed"


class Read:
    """Counts bytes of tensors while a run's weights are read.

    Attributes:
        most: at a time.
        own: of this rank's part of the module.
        largest: of its tensors.
    """

    def __init__(self) -> None:
        self.most = self.own = self.largest = 0

    def within(self, owner: Any, name: str) -> Any:
        """Context in which calls of a method of a class that has a module are counted."""
        method = getattr(owner, name)

        def counting(of: Any, *args: Any) -> Any:
            module = of.weights.module if isinstance(of, Saving) else of.module
            own = [*module.parameters(), *module.buffers()]
            live = LiveBytes(torch.device("cpu"), lambda: [(tensor, "weights") for tensor in own], lambda: ())
            live.begin(None)
            try:
                return method(of, *args)
            finally:
                self.most = max(self.most, *live.end().totals)
                self.own, self.largest = sum(each.nbytes for each in own), max(each.nbytes for each in own)

        return mock.patch.object(owner, name, counting)


def started_from(info: RankInfo, folder: str, sizes: tuple[int, int, int]) -> dict[str, Any]:
    """Bytes of tensors while a run's weights are read, and the weights."""
    strategy, read = MegatronStrategy(*sizes, micro_batch_size=2, initial_weights=folder), Read()
    with read.within(ModelState, "fill_from"):
        trainer = make_trainer(info, strategy, max_steps=1, precision="32-true")
        trainer.fit(HuggingFace(rate=0.0))
    return {**vars(read), "weights": _whole(trainer)}


def resumed_from(info: RankInfo, sizes: tuple[int, int, int]) -> dict[str, Any]:
    """The same where a run goes on from a checkpoint of a module with other weights."""
    path, read = f"{info.directory}/run.ckpt", Read()
    trainer = trainer_of(info, 1, sizes)
    trainer.fit(HuggingFace())
    trainer.save_checkpoint(path)
    saved = _whole(trainer)
    plugins = [ReusedProcesses(info), MegatronCheckpointIO(load_optimizer=False)]
    trainer = trainer_of(info, 2, sizes, plugins=plugins)
    with read.within(Saving, "load"), read.within(Saving, "load_model"):
        trainer.fit(HuggingFace(rate=0.0), ckpt_path=path)
    return {**vars(read), "saved": saved, "weights": _whole(trainer)}


def _whole(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.strategy.full_state_dict().items()}
