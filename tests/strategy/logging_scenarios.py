"""What users log, and where it must arrive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import grad_norm

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trainer_for
from tests.parity.zoo.language import LearnedPositions
from tests.parity.zoo.tasks import MaskedTask, TokenTask


class Talkative(TokenTask):
    """Logs with every reduction, on steps and epochs, in every kind of step and in hooks."""

    def __init__(self) -> None:
        super().__init__(LearnedPositions())
        self.seen = torchmetrics.SumMetric()
        self.top = torchmetrics.MetricCollection(
            {
                "accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=29),
                "top5": torchmetrics.Accuracy(task="multiclass", num_classes=29, top_k=5),
            },
            prefix="val_",
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        logits = self.net(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("samples", float(len(tokens)), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        self.log("largest", logits.amax(), reduce_fx="max", on_step=True, on_epoch=True, sync_dist=True)
        self.log("smallest", logits.amin(), reduce_fx="min", on_step=False, on_epoch=True, sync_dist=True)
        self.log("constant", 3, on_step=True)
        self.log_dict({"group/a": logits.mean(), "group/b": logits.square().mean()}, on_epoch=True, sync_dist=True)
        self.seen(torch.tensor(float(targets.numel())))
        self.log("tokens_seen", self.seen, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("batch_index", float(batch_idx))

    def on_train_epoch_end(self) -> None:
        self.log("epoch_done", float(self.current_epoch))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens, targets = batch
        logits = self.net(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)
        self.log("val_samples", float(len(tokens)), reduce_fx="sum", sync_dist=True)
        self.top.update(logits.flatten(0, 1), targets.flatten())
        self.log_dict(self.top)


class Scored(TokenTask):
    """Logs scores of a batch that are no means over its samples, as metrics and as what calling a metric returned.

    Keeps something of each batch until the epoch ends.
    """

    def __init__(self) -> None:
        super().__init__(LearnedPositions())
        options = {"task": "multiclass", "num_classes": 29, "average": "macro"}
        scores = {"f1": torchmetrics.F1Score(**options), "precision": torchmetrics.Precision(**options)}
        self.scores = torch.nn.ModuleDict({"logged": torchmetrics.MetricCollection(scores)})
        self.called = torchmetrics.MetricCollection(scores, prefix="called_").clone()
        self.recall = torchmetrics.Recall(**options)
        self.losses: list[torch.Tensor] = []
        self.seen: dict[str, list[Any]] = {"predicted": [], "samples": []}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        predicted = logits.argmax(-1)
        self.scores["logged"](predicted, batch[1])
        self.log_dict(self.scores["logged"], on_step=True, on_epoch=True)
        self.log_dict(self.called(predicted, batch[1]))
        self.log("recall", self.recall(predicted, batch[1]), reduce_fx="max")
        self.log("recall_of_start", self.recall(predicted[:, :4], batch[1][:, :4]))
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        self.losses.append(loss)
        self.seen["predicted"].append(predicted)
        self.seen["samples"].append([f"sample {row}" for row in batch[0].tolist()])
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean_of_batches", torch.stack(self.losses).mean())
        self.log("batches", float(len(self.seen["samples"])))
        self.log("largest_batch", float(max(len(predicted) for predicted in self.seen["predicted"])))
        self.losses.clear()
        self.seen = {"predicted": [], "samples": []}
        self.log_dict({f"{name}_whole": value for name, value in self.called.compute().items()})
        self.called.reset()


class Norms(TokenTask):
    """Logs norms of gradients before the update, as Lightning's documentation does."""

    def __init__(self) -> None:
        super().__init__(LearnedPositions())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))
        self.log_dict(grad_norm(next(iter(self.net.children())), norm_type="inf"))


class Record(Callback):
    """Copies all three views of the metrics after every batch and epoch."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def _add(self, where: str, trainer: Trainer) -> None:
        views = {
            "callback": trainer.callback_metrics,
            "logged": trainer.logged_metrics,
            "bar": trainer.progress_bar_metrics,
        }
        self.rows.append(
            {"where": where, **{name: {k: float(v) for k, v in view.items()} for name, view in views.items()}}
        )

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._add("batch", trainer)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self._add("validation", trainer)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        self._add("end", trainer)


def _recorded(
    info: RankInfo,
    layout: Layout | None,
    arguments: Mapping[str, Any],
    make: Callable[[], LightningModule],
    **options: Any,
) -> list[dict[str, Any]]:
    """Metrics of a run of a module that starts from the same weights every time; ``options`` are the Trainer's."""
    record = Record()
    trainer = trainer_for(info, layout, arguments, callbacks=[record], **options)
    torch.manual_seed(1)
    trainer.fit(make())
    return record.rows


def everything_logged(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    return _recorded(info, layout, arguments, Talkative, max_epochs=2)


def batches_scored(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    return _recorded(info, layout, arguments, Scored, max_epochs=2, limit_val_batches=1)


def gradients_logged(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    return _recorded(info, layout, arguments, Norms, max_steps=3, limit_val_batches=0)


def files_written(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    """The CSV file that rank 0 writes, read back by the rank that can see it."""
    logger = CSVLogger(info.directory, name="logs", version="0")
    callbacks: list[Any] = [LearningRateMonitor("step"), EarlyStopping("val_loss", patience=1, min_delta=10.0)]
    trainer = trainer_for(info, layout, arguments, max_epochs=5, logger=logger, callbacks=callbacks)
    torch.manual_seed(1)
    trainer.fit(Talkative())
    lines: list[str] = []
    if info.rank == 0:
        lines = sorted(Path(info.directory, "logs", "0", "metrics.csv").read_text().splitlines()[0].split(","))
    names = {"lr-AdamW/pg1", "lr-AdamW/pg2", "loss_step", "val_loss", "tokens_seen", "epoch", "step"}
    return {
        "stopped": trainer.current_epoch,
        "steps": trainer.global_step,
        "columns": sorted(names & set(lines)) if info.rank == 0 else None,
    }


class PaddedMean(MaskedTask):
    """A token mean over padded batches: micro-batches weigh what they have tokens."""

    def __init__(self) -> None:
        super().__init__(LearnedPositions())

    def loss(self, batch: Any) -> torch.Tensor:
        losses = F.cross_entropy(self.net(batch["input_ids"]).transpose(1, 2), batch["target"], reduction="none")
        return (losses * batch["padding"]).sum() / batch["padding"].sum()


def real_tokens(batch: Any) -> float:
    return float(batch["padding"].sum())


def padded_mean(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    if layout is not None:
        arguments = {**arguments, "micro_batch_loss_weight": real_tokens}
    rows = _recorded(info, layout, arguments, PaddedMean, max_epochs=2, limit_val_batches=0)
    return [row["callback"]["train_loss"] for row in rows if row["where"] == "batch"]


class FirstRankOnly(TokenTask):
    """Logs for global rank 0 alone: on every rank, as Lightning allows it, and under a condition."""

    def __init__(self) -> None:
        super().__init__(LearnedPositions())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("first", loss, rank_zero_only=True, on_step=True, on_epoch=True)
        if self.trainer.is_global_zero:
            self.log("samples", float(len(batch[0])), reduce_fx="sum", rank_zero_only=True)
        return loss


def logged_on_the_first_rank(
    info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]
) -> dict[str, list[float]]:
    """What a logger on global rank 0 gets."""
    rows: dict[str, list[float]] = {}

    class Rows(CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            for name in {"first_step", "first_epoch", "samples", "loss"} & metrics.keys():
                rows.setdefault(name, []).append(float(metrics[name]))

    options = {"logger": Rows(info.directory), "log_every_n_steps": 1, "max_steps": 3}
    trainer_for(info, layout, arguments, **options).fit(FirstRankOnly())
    return rows


class Refused(TokenTask):
    """Logs what Lightning refuses, and goes on."""

    def __init__(self) -> None:
        super().__init__(LearnedPositions())
        self.refusals: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for arguments in ({"name": "a/dataloader_idx_0"}, {"name": "b", "on_step": False, "on_epoch": False}):
            try:
                self.log(value=1.0, **arguments)
            except Exception as error:
                self.refusals.append(f"{type(error).__name__}: {error}")
        return super().training_step(batch, batch_idx)


def refused_at_the_line(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> list[str]:
    """What ``self.log`` has raised within the step, by a single process."""
    module = Refused()
    trainer_for(info, layout, arguments, max_steps=2).fit(module)
    return module.refusals
