"""What steps of evaluation keep for the hooks behind them is, over replicas, what one process keeps of all samples."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torchmetrics import SumMetric

from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.scenario import Layout, differences, trainer_for
from tests.strategy.test_logged_in_evaluation import LAYOUTS, WIDE, Validated

SEEN: list[Tensor] = []
"""A global that a step appends to."""


class Meter:
    """A user's own object."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0


class Keeps(Validated):
    """Keeps outputs, counts and sums by hand; ``read`` is called behind the last batch."""

    padded_from = 4

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("confusion", torch.zeros(2, 17, dtype=torch.float64))
        self.clear()

    def clear(self) -> None:
        self.outputs: list[Any] = []
        self.losses, self.sums, self.rows = [], [], []
        self.meter, self.table, self.hits = Meter(), {"tokens": 0, "batches": 0}, torch.tensor(0)
        self.all, self.words, self.bins = torch.tensor([]), set[int](), [0, 0]
        self.arrays: list[Any] = []
        self.confusion.zero_()
        SEEN.clear()

    def on_validation_epoch_start(self) -> None:
        self.clear()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        logits, kept = self(x), y != -100
        guess, loss = logits.argmax(-1), self.each(x, y)
        right = (guess == y).sum()
        self.outputs.append({"logits": logits.mean(1), "y": y[:, 0]})
        self.losses.append(loss)
        self.sums.append(self.each(x, y, reduction="sum").item())
        self.rows.extend(logits.mean((1, 2)).tolist())
        self.meter.total += float(loss) * int(kept.sum())
        self.meter.count += int(kept.sum())
        self.table["tokens"] += y.numel()
        self.table["batches"] += 1
        self.hits = self.hits + right
        self.all = torch.cat([self.all, logits.mean(1)])
        self.words |= set(x[:, 0].tolist())
        self.bins[0] += int((x > 8).sum())
        self.bins[1] += int((x <= 8).sum())
        self.confusion[0] += logits.sum((0, 1))
        self.arrays.append(logits.mean(1).numpy())
        SEEN.append(logits[:, 0])

    def read(self) -> dict[str, float]:
        """Numbers of all samples."""
        logits = torch.cat([each["logits"] for each in self.outputs])
        found = {
            "spread": logits.std(),
            "targets": torch.cat([each["y"] for each in self.outputs]).double().std(),
            "loss": torch.stack(self.losses).mean(),
            "worst": torch.stack(self.losses).max(),
            "sum": sum(self.sums),
            "entries": len(self.sums),
            "rows": torch.tensor(self.rows).std(),
            "count": len(self.rows),
            "mean": self.meter.total / self.meter.count,
            "tokens": self.table["tokens"],
            "batches": self.table["batches"],
            "hits": self.hits,
            "median": self.all.median(),
            "words": len(self.words),
            "bins": self.bins[0] - self.bins[1] ** 2,
            "confusion": self.confusion.square().sum(),
            "global": torch.cat(SEEN).std(),
            "arrays": numpy.concatenate(self.arrays).std(),
        }
        return {key: torch.as_tensor(value, dtype=torch.float64) for key, value in found.items()}

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.read())


class ReadByCallback(Keeps):
    """A callback reads what the step has kept."""

    def on_validation_epoch_end(self) -> None:
        pass

    def configure_callbacks(self) -> list[Callback]:
        class Reads(Callback):
            def on_validation_epoch_end(self, trainer: Any, pl_module: Keeps) -> None:
                """Logs it."""
                pl_module.log("spread", torch.cat([each["logits"] for each in pl_module.outputs]).std())
                pl_module.log("bins", float(pl_module.bins[0]))

        return [Reads()]


class Gathers(Keeps):
    """Its hook knows of replicas, and gathers by itself."""

    def on_validation_epoch_end(self) -> None:
        logits = torch.cat([each["logits"] for each in self.outputs])
        self.log("spread", self.all_gather(logits).flatten(0, -2).sort(0).values.std())
        self.log("hits", self.all_gather(self.hits).sum().double())


class UpdatesMetric(Keeps):
    """Its hook updates a metric, which is put together over replicas by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = SumMetric()

    def on_validation_epoch_end(self) -> None:
        self.sum((torch.cat([each["logits"] for each in self.outputs]) > 0).sum())
        self.log("sum", self.sum)


class Unclear(Keeps):
    """Keeps the best of a batch's means, which is not made of those of its parts."""

    best = 0.0

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.best = max(self.best, float(self.losses[-1]))

    def on_validation_epoch_end(self) -> None:
        self.log("best", self.best)


class BehindBatch(Keeps):
    """Its own hook behind each batch keeps what the step has returned."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        return self(batch[0])

    def on_validation_batch_end(self, outputs: Tensor, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.losses.append(outputs)

    def on_validation_epoch_end(self) -> None:
        self.log("spread", torch.cat(self.losses).std())


class Scores(Callback):
    """Collects what steps have returned."""

    def __init__(self) -> None:
        self.scores: list[Tensor] = []

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Keeps it."""
        self.scores.append(outputs)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Keeps) -> None:
        """Logs it."""
        pl_module.log("spread", self.seen(pl_module).std())

    def seen(self, module: Keeps) -> Tensor:
        """All of it."""
        return torch.cat(self.scores)


class GatheredScores(Scores):
    """Knows that there are replicas."""

    def seen(self, module: Keeps) -> Tensor:
        found = super().seen(module)
        return found if module.trainer.world_size == 1 else module.all_gather(found)


class ByCallback(BehindBatch):
    """A callback does so."""

    callback: type[Callback] = Scores

    def on_validation_batch_end(self, *_: Any) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        pass

    def configure_callbacks(self) -> list[Callback]:
        return [self.callback()]


class Thresholds(Scores):
    """Sets what the module goes on from."""

    def on_validation_epoch_end(self, trainer: Any, pl_module: Keeps) -> None:
        pl_module.best = float(self.seen(pl_module).std())


class BySetting(ByCallback):
    """Which sets a number on the module."""

    callback = Thresholds
    best = 0.0


class ByGathering(ByCallback):
    """Which gathers by itself."""

    callback = GatheredScores


class Logging(Keeps):
    """Logs in the step as well."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("step_loss", self.losses[-1])


class ByIndex(Keeps):
    """Sets what it keeps of a sample at the sample's place."""

    def clear(self) -> None:
        super().clear()
        self.placed, self.listed = torch.zeros(97, dtype=torch.float64), [0.0] * 97

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, _ = batch
        scores = self(x).mean((1, 2))
        places = (x * torch.arange(1, 1 + x.size(1))).sum(1) % 97
        self.placed[places] = scores
        for place, score in zip(places.tolist(), scores.tolist(), strict=True):
            self.listed[place] = score

    def read(self) -> dict[str, float]:
        found = {"placed": self.placed, "listed": torch.tensor(self.listed)}
        return {key: (value.double() * torch.arange(97)).norm() for key, value in found.items()}


class Loaders(Keeps):
    """Keeps a list for each of two loaders."""

    def clear(self) -> None:
        super().clear()
        self.by_loader: dict[int, list[Tensor]] = {0: [], 1: []}

    def val_dataloader(self) -> Any:
        return [super().val_dataloader(), super().val_dataloader()]

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.by_loader[dataloader_idx].append(self(batch[0]) * (1 + dataloader_idx))

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        for loader, found in self.by_loader.items():
            self.log(f"spread_{loader}", torch.cat(found).std())


class InTraining(Keeps):
    """Keeps what steps of training have made, as a module does that logs at the end of an epoch."""

    def on_validation_epoch_start(self) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        pass

    def on_train_epoch_start(self) -> None:
        self.clear()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            Keeps.validation_step(self, batch, batch_idx)
        return self.each(*batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("loss_between", self.each(*batch))

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.read())


class Synced(InTraining):
    """Its hooks log as such do that know of replicas: what is the same on all of them is not added up."""

    def on_train_epoch_end(self) -> None:
        for key, value in self.read().items():
            self.log(key, value, sync_dist=True, reduce_fx="max" if key == "worst" else "sum")
        self.log("trained", self.counted, sync_dist=True, reduce_fx="sum")

    def on_validation_epoch_start(self) -> None:
        self.right = torch.tensor(0)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.right = self.right + (self(batch[0]).argmax(-1) == batch[1]).sum()

    def on_validation_epoch_end(self) -> None:
        self.log("right", self.right.double(), sync_dist=True, reduce_fx="sum")

    @property
    def counted(self) -> float:
        """Something that replicas have unlike parts of, and no step has kept."""
        rank, replicas = self.trainer.global_rank, self.trainer.world_size
        return 3.0 if replicas == 1 else float(1 + rank)


class NotCleared(InTraining):
    """Goes on from what earlier epochs have kept."""

    def on_train_epoch_start(self) -> None:
        pass


class WithGraph(Validated):
    """Keeps losses with their graphs, and sets a learning rate by them."""

    def __init__(self) -> None:
        super().__init__()
        self.training_step_outputs: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.each(*batch)
        self.training_step_outputs.append(loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        pass

    def on_train_epoch_end(self) -> None:
        mean = torch.stack(self.training_step_outputs).mean()
        self.log("mean", mean)
        for group in self.optimizers().param_groups:
            group["lr"] = 0.01 * float(mean.detach())
        self.training_step_outputs.clear()


class ReadsBetween(InTraining):
    """Steps read what they have kept."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (1.0 + 0.001 * len(self.losses))


class ReadsByProperty(InTraining):
    """Steps read it by a property."""

    @property
    def seen(self) -> int:
        """Batches of this epoch."""
        return len(self.losses)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (1.0 + 0.001 * self.seen)


class BestInTraining(WithGraph):
    """Keeps the largest mean, which is not made of those of parts."""

    best = 0.0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.each(*batch)
        self.best = max(self.best, float(loss.detach()))
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("best", self.best)


TRAINED: dict[str, type[Validated]] = {
    kind.__name__: kind
    for kind in (InTraining, Synced, NotCleared, WithGraph, ReadsBetween, ReadsByProperty, BestInTraining)
}
KINDS: dict[str, type[Keeps]] = {
    kind.__name__: kind
    for kind in (
        *(Keeps, ReadByCallback, Gathers, UpdatesMetric, Unclear, Logging, Loaders, ByIndex),
        *(BehindBatch, ByCallback, BySetting, ByGathering),
    )
}


def kept(info: RankInfo, layout: Layout | None, name: str, arguments: Mapping[str, Any]) -> Any:
    """What two validations have logged."""
    torch.manual_seed(0)
    trainer, module = trainer_for(info, layout, arguments, max_epochs=1), KINDS[name]()
    found = []
    for _ in range(2):
        trainer.validate(module, verbose=False)
        found.append({key: float(value) for key, value in trainer.callback_metrics.items()})
    return found


def kept_in_training(info: RankInfo, layout: Layout | None, name: str, arguments: Mapping[str, Any]) -> Any:
    """What two epochs have logged, and the weights behind them."""
    torch.manual_seed(0)
    arguments = {"micro_batch_size": "auto", **arguments}
    trainer, module = trainer_for(info, layout, arguments, max_epochs=2, val_check_interval=0.5), TRAINED[name]()
    trainer.fit(module)
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return logged, {key: value.norm() for key, value in module.named_parameters() if not value.is_meta}


EVERYDAY = (LAYOUTS.index(((1, 2), {})), LAYOUTS.index(((2, 2), {"micro_batch_size": 2})))
ROWS = [
    pytest.param(name, layout, arguments, marks=() if name in ("Keeps", "ByIndex") and number in EVERYDAY else WIDE)
    for name in ("Keeps", "ReadByCallback", "Gathers", "UpdatesMetric", "Logging", "Loaders", "ByIndex")
    for number, (layout, arguments) in enumerate(LAYOUTS)
]


@pytest.mark.parametrize(("name", "layout", "arguments"), ROWS, ids=str)
def test_hooks_find_what_one_process_keeps(name: str, layout: Layout, arguments: Mapping[str, Any]) -> None:
    expected = one_process(kept, None, name, {})
    ranks = arguments.get("tensor_parallel_size", 1) * arguments.get("context_parallel_size", 1)
    for found in run_trainers(kept, layout, name, arguments, devices=layout[0] * layout[1] * ranks):
        for here, there in zip(found.value, expected, strict=True):
            assert here.keys() == there.keys()
            assert not list(differences("logged", here, there, 1e-9)), found.output


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    ("name", "layout", "arguments"),
    [
        pytest.param(name, layout, arguments, marks=() if number == EVERYDAY[turn % 2] else WIDE)
        for turn, name in enumerate(
            ("InTraining", "WithGraph", "NotCleared", "BestInTraining", "ReadsBetween", "ReadsByProperty")
        )
        for number, (layout, arguments) in enumerate(LAYOUTS)
        if "evaluation_micro_batch_size" not in arguments
    ],
    ids=str,
)
def test_hooks_behind_training_find_what_one_process_keeps(
    name: str, layout: Layout, arguments: Mapping[str, Any]
) -> None:
    logged, weights = one_process(kept_in_training, None, name, {})
    ranks = arguments.get("tensor_parallel_size", 1) * arguments.get("context_parallel_size", 1)
    for found in run_trainers(kept_in_training, layout, name, arguments, devices=layout[0] * layout[1] * ranks):
        assert "from the samples of each of" not in found.output
        assert found.value[0].keys() == logged.keys()
        assert not list(differences("logged", found.value[0], logged, 1e-9)), found.output
        if ranks == 1 and not arguments.get("weight_sharding"):
            mine = found.value[1]
            assert not list(differences("weights", mine, {key: weights[key] for key in mine}, 1e-9))


def test_what_hooks_sum_over_replicas_is_summed_once() -> None:
    logged, _ = one_process(kept_in_training, None, "Synced", {})
    for found in run_trainers(kept_in_training, (1, 2), "Synced", {}, devices=2):
        assert not list(differences("logged", found.value[0], logged, 1e-9)), found.output


@pytest.mark.everyday(1)
@pytest.mark.parametrize("layout", [pytest.param((1, 2), id="dp2"), pytest.param((2, 2), id="pp2xdp2", marks=WIDE)])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Unclear", r"`validation_step` writes `best` from the samples of each of the 2 replicas"),
        ("BehindBatch", r"`validation_step`, or `on_validation_batch_end`, writes `losses` from the samples of each"),
        ("BySetting", r"callbacks collect `Thresholds.scores` in `on_validation_batch_end` from the samples of each"),
        ("ByCallback", r"callbacks collect `Scores.scores` in `on_validation_batch_end` from the samples of each"),
    ],
)
def test_what_does_not_come_together_is_named(name: str, said: str, layout: Layout) -> None:
    found = run_trainers(kept, layout, name, {}, devices=layout[0] * layout[1], check=False, grace=20.0)
    assert re.search(said, f"{found[0].error}{found[0].output}"), found[0].error


def test_callbacks_that_gather_by_themselves_are_not_named() -> None:
    (expected, _) = one_process(kept, None, "ByGathering", {})
    for found in run_trainers(kept, (1, 2), "ByGathering", {}, devices=2):
        assert found.value[0].keys() == expected.keys()


def test_each_replicas_own_is_kept_where_the_user_means_it() -> None:
    found = run_trainers(kept, (1, 2), "Keeps", {"whole_batch_loss": False}, devices=2)
    counts = Counter(round(each.value[0]["count"]) for each in found)
    assert counts == {round(one_process(kept, None, "Keeps", {})[0]["count"]) // 2: 2}
