"""Habits of users that no table row has: gradients touched in hooks, shuffled loaders, skipped batches, own clips."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, ModelSummary, OnExceptionCheckpoint, TQDMProgressBar
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trainer_for
from tests.parity.zoo.blocks import HIDDEN
from tests.parity.zoo.data import BATCH, TRAIN, Items
from tests.parity.zoo.language import LearnedPositions
from tests.parity.zoo.loops import Walker
from tests.parity.zoo.registry import build
from tests.parity.zoo.tasks import TokenTask
from tests.parity.zoo.whole import FlatModule


def _numbers(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


class Losses(Callback):
    """The loss of every batch, as the loop sees it."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, Mapping) and outputs else None
        self.values.append(math.nan if loss is None else float(loss))


def _fit(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], module: Any, **options: Any) -> Any:
    losses = Losses()
    trainer = trainer_for(info, layout, arguments, **{"max_epochs": 2, "callbacks": [losses], **options})
    trainer.fit(module)
    return [losses.values, trainer.global_step, _numbers(trainer)]


class Shuffled(FlatModule):
    """A loader that shuffles, as training loaders do."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Items(TRAIN), BATCH, shuffle=True, collate_fn=self.collate)  # type: ignore[arg-type]


def shuffled(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    torch.manual_seed(3)
    return _fit(info, layout, arguments, Shuffled())


class HandMade(FlatModule):
    """Scales gradients in a hook, clips on its own, warms the learning rate up inside ``optimizer_step``."""

    def on_after_backward(self) -> None:
        for name, parameter in self.named_parameters():
            if "embed" in name and parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (self.global_step + 1)
        optimizer.step(closure=optimizer_closure)


def hand_made(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    torch.manual_seed(3)
    return _fit(info, layout, arguments, HandMade())


class SkipsBatches(FlatModule):
    """Returns nothing for the second batch of each epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def skipped(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    warnings.filterwarnings("ignore", ".*`training_step` returned `None`", UserWarning)  # this one is on purpose
    torch.manual_seed(3)
    return _fit(info, layout, arguments, SkipsBatches())


class SkipsOnOneRank(FlatModule):
    """Leaves a batch out on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.global_rank == self.rank:
            return None
        return super().training_step(batch, batch_idx)


def skipped_by_one(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], rank: int) -> Any:
    return _fit(info, layout, arguments, SkipsOnOneRank(rank))


class NamedSamples(TokenTask):
    """A list of strings, an integer and None travel with the tensors; strings belong to their samples."""

    def __init__(self) -> None:
        super().__init__(LearnedPositions())

    def collate(self, samples: list[dict[str, Tensor]]) -> Any:
        batch = default_collate(samples)
        names = ["-".join(map(str, row.tolist())) for row in batch["tokens"]]
        return {"ids": batch["tokens"], "names": names, "targets": batch["targets"], "version": 3, "nothing": None}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, batch_size=len(batch["ids"]))  # Lightning could not infer it from strings
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch["ids"]))

    def loss(self, batch: Any) -> Tensor:
        assert batch["version"] == 3 and batch["nothing"] is None
        assert [list(map(int, name.split("-"))) for name in batch["names"]] == batch["ids"].tolist()
        return super().loss((batch["ids"], batch["targets"]))


def named_samples(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    torch.manual_seed(3)
    return _fit(info, layout, arguments, NamedSamples())


def fast_dev_run(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    return _fit(info, layout, arguments, build("nanogpt"), fast_dev_run=2)


class Unfreeze(Callback):
    """Freezes the embedding for one epoch, then lets it learn."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.embed.requires_grad_(False)  # type: ignore[union-attr]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            pl_module.embed.requires_grad_(True)  # type: ignore[union-attr]


def unfrozen_later(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    losses = Losses()
    report = _fit(info, layout, arguments, build("flat_module"), callbacks=[losses, Unfreeze()])
    return [losses.values, *report[1:]]


def shown(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    """Fits with a progress bar and a model summary; the test reads what was printed."""
    callbacks: list[Any] = [TQDMProgressBar(refresh_rate=1), ModelSummary(max_depth=2)]
    options = {"callbacks": callbacks, "enable_progress_bar": True, "enable_model_summary": True}
    trainer = trainer_for(info, layout, arguments, max_epochs=1, **options)
    module = build("nanogpt")
    trainer.fit(module)
    return f"{float(trainer.callback_metrics['train_loss']):.2f}"


class Crash(Callback):
    """Every rank fails at the same step, as when a time limit ends a job."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            raise TimeoutError("the end of the night")


def saved_on_exception(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    """Crashes after three steps; the same script, started again, goes on from what OnExceptionCheckpoint left."""
    for said in ("was called without a model", "there is no last checkpoint"):
        warnings.filterwarnings("ignore", f".*{said}", UserWarning)  # Lightning's, whenever it has this callback
    saver = OnExceptionCheckpoint(info.directory, "crash")
    options = {"max_steps": 6, "enable_checkpointing": True}
    trainer = trainer_for(info, layout, arguments, callbacks=[saver, Crash()], **options)
    try:
        trainer.fit(build("nanogpt"))
    except TimeoutError as error:
        assert str(error) == "the end of the night"
    path = Path(info.directory) / "crash.ckpt"
    assert path.exists(), list(Path(info.directory).iterdir())
    again = trainer_for(info, layout, arguments, callbacks=[saver], **options)
    again.fit(build("nanogpt", seed=9))
    return [again.global_step, _numbers(again)]


def straight_to_six(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    trainer = trainer_for(info, layout, arguments, max_steps=6)
    trainer.fit(build("nanogpt"))
    return [trainer.global_step, _numbers(trainer)]


def by_name(info: RankInfo) -> Any:
    """The strategy by its registered name, with Lightning's sampler and its defaults."""
    from lightning_megatron import MegatronStrategy  # registers the name
    from tests.parity.train import make_trainer

    trainer = make_trainer(info, "megatron", max_epochs=1, use_distributed_sampler=True)
    torch.manual_seed(3)
    trainer.fit(Shuffled())
    return [trainer.global_step, isinstance(trainer.strategy, MegatronStrategy), _numbers(trainer)]


def in_precision(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], precision: str) -> Any:
    """The losses of two epochs in another precision."""
    return _fit(info, layout, arguments, build("nanogpt"), precision=precision)[0]


def two_trainers(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    """Trains with one Trainer, goes on with a second, and evaluates with a third."""
    torch.manual_seed(3)
    module = FlatModule()
    first = _fit(info, layout, arguments, module, max_epochs=1)
    second = _fit(info, layout, arguments, module, max_epochs=1)
    trainer = trainer_for(info, layout, arguments)
    return [first, second, trainer.validate(module, verbose=False)]


def another_layout(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    """Goes on with a module that holds one tensor-parallel part as if it were whole."""
    torch.manual_seed(3)
    module = FlatModule()
    _fit(info, layout, {**arguments, "tensor_parallel_size": 2}, module, max_epochs=1)
    return _fit(info, (1, 2), arguments, module, max_epochs=1)


class RunningMean(torch.nn.Module):
    """Subtracts a mean that it follows while training; no parameters."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(HIDDEN, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return x - self.mean


class Averaging(Walker):
    """Running means before the layers, inside them and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = RunningMean(), RunningMean()
        for block in self.blocks:
            block.ln_1 = torch.nn.Sequential(block.ln_1, RunningMean())  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.late(self.walk(self.early(self.embed(tokens)))))


class Counting(TokenTask):
    """Fills a buffer of its own after the layers."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__(Averaging())
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.seen += len(batch[0])
        return loss


def buffers_filled(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    """What the buffers hold after two epochs, on every rank that has them, and what a checkpoint of them restores."""
    torch.manual_seed(3)
    module = Counting()
    trainer = trainer_for(info, layout, arguments, max_epochs=2)
    trainer.fit(module)
    kept = {name: buffer for name, buffer in module.named_buffers() if "blocks" not in name}
    path = Path(info.directory) / "means.ckpt"
    trainer.save_checkpoint(path)
    torch.manual_seed(3)
    again = trainer_for(info, layout, arguments, max_epochs=4)
    again.fit(fresh := Counting(), ckpt_path=path)
    return [kept, int(fresh.seen), _numbers(trainer), _numbers(again)]


class Backbone(TokenTask):
    """A backbone that a callback freezes for two epochs, with the first stage's layers in it."""

    def __init__(self) -> None:
        super().__init__(Walker())
        self.backbone = torch.nn.ModuleList([self.net.embed, self.net.blocks[0], self.net.blocks[1]])
        self.example_input_array = torch.zeros(2, 8, dtype=torch.int64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([parameter for parameter in self.parameters() if parameter.requires_grad], lr=1e-2)


def finetuned(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    """Nothing to learn on the first stage, and then everything; an example input that no stage can run whole."""
    torch.manual_seed(3)
    losses, thaw = Losses(), BackboneFinetuning(unfreeze_backbone_at_epoch=2, backbone_initial_lr=1e-3)
    module, options = Backbone(), {"max_epochs": 4, "enable_model_summary": True}
    report = _fit(info, layout, arguments, module, callbacks=[losses, thaw], **options)
    return [losses.values, *report[1:]]


class Ragged(TokenTask):
    """Batches are lists of sequences of different lengths, padded by the step."""

    def __init__(self) -> None:
        super().__init__(Walker())

    def collate(self, samples: list[dict[str, Tensor]]) -> Any:
        lengths = [3 + index % 5 for index in range(len(samples))]
        pairs = [(s["tokens"][:length], s["targets"][:length]) for s, length in zip(samples, lengths, strict=True)]
        return [tokens for tokens, _ in pairs], [targets for _, targets in pairs]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch[0]))

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        padded = torch.nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=-1)
        logits = self.net(torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True))
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), padded, reduction="none", ignore_index=-1)
        return (losses.sum(1) / (padded >= 0).sum(1)).mean()


class OneLength(Ragged):
    """All sequences of a batch are of one length by chance, and in some batches as many words long as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.collated = 0

    def collate(self, samples: list[dict[str, Tensor]]) -> Any:
        tokens, targets = super().collate(samples)
        self.collated += self.trainer.training
        if length := (0, 0, 5, len(samples))[self.collated % 4]:
            tokens = [each["tokens"][:length] for each in samples]
            targets = [each["targets"][:length] for each in samples]
        return tokens, targets


class OneLengthBeside(OneLength):
    """The same, beside a tensor of the batch."""

    def collate(self, samples: list[dict[str, Tensor]]) -> Any:
        return {"first": torch.stack([each["tokens"][0] for each in samples]), "pairs": super().collate(samples)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert len(batch["first"]) == len(batch["pairs"][0]), "cut alike"
        return super().training_step(batch["pairs"], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch["pairs"], batch_idx)


def ragged(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    torch.manual_seed(3)
    return _fit(info, layout, arguments, Ragged())


def ragged_of_one_length(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    torch.manual_seed(3)
    return _fit(info, layout, arguments, OneLength())


def ragged_beside(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    torch.manual_seed(3)
    return _fit(info, layout, arguments, OneLengthBeside())
