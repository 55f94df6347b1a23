"""The rest of Lightning's life: hooks, repeated fits, prediction, limits, data modules, iterable data, resuming."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trainer_for
from tests.parity.zoo.data import TRAIN, Items, loader
from tests.parity.zoo.registry import build
from tests.parity.zoo.whole import FlatModule

OTHER_HOOKS = (
    *("setup", "teardown", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
    *("configure_optimizers", "configure_gradient_clipping", "configure_callbacks"),
    *("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "transfer_batch_to_device"),
)
HOOKS = [name for name in dir(LightningModule) if name.startswith("on_") and name != "on_gpu"] + [*OTHER_HOOKS]
CALLBACK_HOOKS = [name for name in dir(Callback) if name.startswith("on_") or name in ("setup", "teardown")]


def _recording(base: type, names: list[str]) -> type:
    """A subclass of ``base`` that notes each of its hooks in ``self.calls`` and goes on as before."""

    def noting(name: str) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return getattr(super(recording, self), name)(*args, **kwargs)

        return hook

    recording: Any = type(f"Recording{base.__name__}", (base,), {})
    for name in names:
        if hasattr(base, name):
            setattr(recording, name, noting(name))
    return recording


def hooks_called(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    """Names of module and callback hooks in the order they were called, for fit, test and predict."""
    torch.manual_seed(1)
    module: Any = _recording(FlatModule, HOOKS)()
    callback: Any = _recording(Callback, CALLBACK_HOOKS)()
    module.calls, callback.calls = [], []
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_epochs": 2, "enable_checkpointing": True}
    best = ModelCheckpoint(dirpath=Path(info.directory) / "hooks")
    trainer = trainer_for(info, layout, arguments, callbacks=[callback, best], **options)
    trainer.fit(module)
    trainer.test(module, verbose=False)
    trainer.predict(module)
    return {"module": module.calls, "callback": callback.calls}


def verbs_in_turn(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    """validate, fit, validate, test, then fit again for longer, on one Trainer."""
    trainer = trainer_for(info, layout, arguments, max_epochs=1)
    module = build("nanogpt")
    report = [trainer.validate(module, verbose=False)]
    trainer.fit(module)
    report += [trainer.validate(module, verbose=False), trainer.test(module, verbose=False)]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    report += [trainer.test(module, verbose=False), {name: float(v) for name, v in trainer.callback_metrics.items()}]
    return [report, trainer.global_step]


def predictions(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    """A list of dictionaries of tensors, one per batch."""
    trainer = trainer_for(info, layout, arguments)
    return trainer.predict(build("flat_module"))


def part_of_predictions(replicas: int, replica: int, reference: list[dict[str, Tensor]]) -> Any:
    """The slice of every batch that belongs to ``replica``."""
    return [{name: value.chunk(replicas)[replica] for name, value in batch.items()} for batch in reference]


def limits(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    """Fewer batches, validation inside the epoch, a time limit that is not reached."""
    options = {"limit_train_batches": 2, "limit_val_batches": 1, "val_check_interval": 1, "max_time": "00:01:00:00"}
    trainer = trainer_for(info, layout, arguments, max_epochs=2, num_sanity_val_steps=0, **options)
    trainer.fit(build("learned_positions"))
    return [trainer.global_step, {name: float(v) for name, v in trainer.callback_metrics.items()}]


def overfit(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    trainer = trainer_for(info, layout, arguments, max_epochs=3, overfit_batches=1)
    trainer.fit(build("learned_positions"))
    return [trainer.global_step, {name: float(v) for name, v in trainer.callback_metrics.items()}]


class Stream(IterableDataset[Any]):
    """Whole batches of token pairs without a length."""

    def __init__(self, replica: int, replicas: int) -> None:
        self.replica, self.replicas = replica, replicas

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        items = Items(TRAIN)
        for start in range(0, TRAIN, 4):
            part = slice(start + self.replica * 4 // self.replicas, start + (self.replica + 1) * 4 // self.replicas)
            yield items.tokens[part], items.targets[part]


class Streams(LightningDataModule):
    """A data module over an iterable data set, fitted and validated."""

    def _stream(self) -> DataLoader[Any]:
        assert self.trainer is not None
        parts = self.trainer.distributed_sampler_kwargs or {}
        return DataLoader(Stream(parts.get("rank", 0), parts.get("num_replicas", 1)), batch_size=None)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._stream()

    def val_dataloader(self) -> DataLoader[Any]:
        return self._stream()


def iterable(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    trainer = trainer_for(info, layout, arguments, max_epochs=2)
    trainer.fit(build("nanogpt"), datamodule=Streams())
    return [trainer.global_step, {name: float(v) for name, v in trainer.callback_metrics.items()}]


class TwoLoaders(FlatModule):
    """Two validation loaders, told apart by their index."""

    def val_dataloader(self) -> Any:
        return [loader(self, Items(8, seed=5), self.collate), loader(self, Items(12, seed=6), self.collate)]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:  # type: ignore[override]
        self.log("val", self.loss(batch), sync_dist=True)
        self.log(
            f"own_{dataloader_idx}", float(len(batch[0])), add_dataloader_idx=False, reduce_fx="sum", sync_dist=True
        )

    def on_validation_epoch_end(self) -> None:
        return None


def two_loaders(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    torch.manual_seed(1)
    trainer = trainer_for(info, layout, arguments, max_epochs=1)
    trainer.fit(TwoLoaders())
    return {name: float(v) for name, v in trainer.callback_metrics.items()}


class Raise(Callback):
    """Stops a run in the middle, as a full disk or a pre-emption would."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            raise RuntimeError("power cut")


def resumed(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    """Six steps in two runs: three, a checkpoint, three more from ``ckpt_path``; or straight through."""
    folder = Path(info.directory) / "resume"
    options = {"dirpath": folder, "filename": "at-{step}", "every_n_train_steps": 3, "save_top_k": -1}
    module = build("nanogpt")
    trainer = trainer_for(
        info, layout, arguments, max_steps=3, callbacks=[ModelCheckpoint(**options)], enable_checkpointing=True
    )
    trainer.fit(module)
    again = trainer_for(
        info, layout, arguments, max_steps=6, callbacks=[ModelCheckpoint(**options)], enable_checkpointing=True
    )
    fresh = build("nanogpt", seed=8)
    again.fit(fresh, ckpt_path=str(folder / "at-step=3.ckpt"))
    return [again.global_step, {name: float(v) for name, v in again.callback_metrics.items()}]


def straight(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    trainer = trainer_for(info, layout, arguments, max_steps=6)
    trainer.fit(build("nanogpt"))
    return [trainer.global_step, {name: float(v) for name, v in trainer.callback_metrics.items()}]
