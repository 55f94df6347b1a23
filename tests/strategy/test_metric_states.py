"""Metrics that are told numbers of a batch are told them once per batch; wrapped ones are computed on all stages."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import (
    Accuracy,
    AveragePrecision,
    CatMetric,
    F1Score,
    KendallRankCorrCoef,
    MaxMetric,
    MeanMetric,
    Metric,
    MetricCollection,
    SumMetric,
)
from torchmetrics.aggregation import RunningMean
from torchmetrics.wrappers import MetricTracker

from lightning_megatron import MegatronStrategy
from lightning_megatron.strategy.hooks.metric_states import MetricStates
from lightning_megatron.strategy.logs.metrics import MetricCalls
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.train import make_trainer

WIDE = pytest.mark.wide
CLASSES = 5


class Net(LightningModule):
    """Classifies; metrics see its samples."""

    batch = 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(8, CLASSES)
        self.highest, self.total, self.mean, self.latest = MaxMetric(), SumMetric(), MeanMetric(), RunningMean(3)
        self.accuracy, self.all = Accuracy(task="multiclass", num_classes=CLASSES), CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.head(self.layers(batch[0]))
        loss = F.cross_entropy(scores, batch[1])
        self.count(loss.detach(), scores.detach(), batch[1])
        return loss

    def count(self, loss: Tensor, scores: Tensor, classes: Tensor) -> None:
        self.highest.update(scores.max())
        self.total.update((scores.argmax(-1) == classes).sum())
        self.mean.update(loss)
        self.accuracy.update(scores, classes)
        self.all.update(scores[:, 0])

    def on_train_epoch_end(self) -> None:
        self.found = [float(each.compute()) for each in (self.highest, self.total, self.mean)]
        self.found.append(float(self.last()))
        if self.accuracy.update_called:  # by the last stage, which the others are told
            self.found.append(float(self.accuracy.compute()))

    def last(self) -> Tensor:
        return self.all.compute().std()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OfBatches(Net):
    """Metrics see its loss."""

    def count(self, loss: Tensor, scores: Tensor, classes: Tensor) -> None:
        self.highest.update(loss)
        self.total(loss)
        self.mean.update(scores.max())
        self.latest.update(loss)

    def last(self) -> Tensor:
        return self.latest.compute()


class Sized(Net):
    """Says what a batch counts in the mean of an epoch whose last batch is smaller."""

    batch = 10

    def count(self, loss: Tensor, scores: Tensor, classes: Tensor) -> None:
        self.log("the same", loss, batch_size=5, on_step=False, on_epoch=True, sync_dist=True)
        self.log("its own", loss, batch_size=len(classes), on_step=False, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.found = []

    def on_train_end(self) -> None:
        self.found = [float(self.trainer.callback_metrics[name]) for name in ("the same", "its own")]


class SomeLogits(Net):
    """A metric takes scores for logits where one of them is below 0, which those of some samples are."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = Accuracy(task="binary")

    def count(self, loss: Tensor, scores: Tensor, classes: Tensor) -> None:
        self.accuracy.update(scores[:, 0] + 0.7 - 2.0 * (classes == 0), classes % 2)

    def on_train_epoch_end(self) -> None:
        self.found = [float(self.accuracy.compute())]


class Told(Net):
    """Means and sums see its loss, one by a call whose value is logged; the last batch is smaller."""

    batch, weighs = 10, False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        scores = self.head(self.layers(x))
        of_targets = F.cross_entropy(scores, y, ignore_index=0)
        loss = of_targets if self.weighs else F.cross_entropy(scores, y)
        self.mean.update(of_targets.detach())
        self.total.update(value=loss.detach())
        self.log("called", self.called(loss, 2.0))
        self.log("mean", self.logged, on_step=False, on_epoch=True)
        self.logged.update(loss)
        self.accuracy.update(scores, y)
        self.kept.append(float(of_targets))
        return loss

    def __init__(self) -> None:
        super().__init__()
        self.called, self.logged = MeanMetric(), MeanMetric()
        self.kept: list[float] = []
        self.steps: list[float] = []

    def on_train_epoch_end(self) -> None:
        self.found = [float(each.compute()) for each in (self.total, self.mean, self.called, self.accuracy)]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(float(self.trainer.logged_metrics["called"]))

    def on_train_end(self) -> None:
        self.found += [float(self.trainer.callback_metrics["mean"]), *self.kept, *self.steps]


class ToldOfTargets(Told):
    """The loss is a mean over targets, of which micro-batches have unlike numbers."""

    weighs = True


class Scored(Net):
    """Logs scores of batches that are no means, by object and by value; metrics see a mean over targets. The last batch
    is smaller.
    """

    batch = 10

    def __init__(self) -> None:
        super().__init__()
        self.macro = F1Score(task="multiclass", num_classes=CLASSES, average="macro")
        self.scores = MetricCollection({"curve": AveragePrecision(task="binary"), "rank": KendallRankCorrCoef()})
        self.none = RunningMean(3)  # has no value that a step could log
        self.steps: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        scores = self.head(self.layers(x))
        loss = F.cross_entropy(scores, y, ignore_index=0)
        self.macro(scores, y)
        self.log("macro", self.macro, on_step=True, on_epoch=True)
        self.log(
            "curve", self.scores["curve"](scores[:, 0].sigmoid(), y % 2), reduce_fx="sum", on_step=True, on_epoch=True
        )
        self.log("rank", self.scores["rank"](scores[:, 0], y.double()))
        self.log("none", self.none)
        self.log("called", self.mean(loss.detach()))
        self.total.update(loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append({name: float(value) for name, value in self.trainer.logged_metrics.items()})

    def on_train_epoch_end(self) -> None:
        self.found = [float(each.compute()) for each in (self.total, self.mean)]

    def on_train_end(self) -> None:
        self.found += [value for step in self.steps for _, value in sorted(step.items())]
        self.found += [float(self.trainer.callback_metrics[name]) for name in ("macro_epoch", "curve_epoch")]


class Tracked(Net):
    """Tracks a metric from epoch to epoch, by a copy that is made for each."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = MetricTracker(Accuracy(task="multiclass", num_classes=CLASSES))

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()

    def count(self, loss: Tensor, scores: Tensor, classes: Tensor) -> None:
        self.tracker.update(scores, classes)

    def on_train_epoch_end(self) -> None:
        self.found = [float(self.tracker.compute()), float(self.tracker.best_metric())]


class OfTokens(Net):
    """A metric keeps numbers of tokens, which context ranks share out."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = KendallRankCorrCoef()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.layers(x[:, None] * torch.arange(1.0, 7.0)[:, None])
        self.rank.update(hidden.mean(-1).flatten(), y.repeat_interleave(6).double())
        return F.cross_entropy(self.head(hidden.mean(1)), y)

    def on_train_epoch_end(self) -> None:
        self.found = [float(self.rank.compute())]


class Validates(Net):
    """Metrics of validation see its samples, and a mean its loss, which is logged where the epoch ends."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.layers(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self.head(self.layers(batch[0]))
        self.count(F.cross_entropy(scores, batch[1]), scores, batch[1])
        self.mean.update(F.cross_entropy(scores, batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.log("mean", self.mean.compute())
        super().on_train_epoch_end()

    def on_train_epoch_end(self) -> None:
        pass


class ValidatesOfBatches(Validates):
    """A sum of validation sees its loss, without a log in the step."""

    def count(self, loss: Tensor, scores: Tensor, classes: Tensor) -> None:
        self.total.update(loss)
        self.highest.update(scores.max())

    def last(self) -> Tensor:
        return self.mean.compute()


class LogsHighest(Validates):
    """A maximum of validation sees its loss, and is logged in the step."""

    def count(self, loss: Tensor, scores: Tensor, classes: Tensor) -> None:
        self.highest(loss)
        self.log("highest", self.highest)

    def last(self) -> Tensor:
        return self.mean.compute()


OF_TRAINING = (Net, SomeLogits, OfBatches, Sized, Told, ToldOfTargets, Scored, OfTokens, Tracked)
KINDS = {kind.__name__: kind for kind in (*OF_TRAINING, Validates, ValidatesOfBatches, LogsHighest)}


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def fit(info: RankInfo, name: str, options: dict[str, Any] | None) -> tuple[list[float], list[str]]:
    """What the metrics give behind an epoch of three batches, and warnings."""
    torch.manual_seed(2)
    module = KINDS[name]().double()
    for metric in module.modules():
        if isinstance(metric, Metric):
            metric.set_dtype(torch.float64)
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(24, 8, generator=generator).double(), torch.randint(0, CLASSES, (24,), generator=generator)
    )
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    trainer = make_trainer(info, strategy, max_epochs=1, precision="64-true")
    sizes = getattr(trainer.strategy, "distributed_sampler_kwargs", None) if options is not None else None
    sampler = DistributedSampler(data, **sizes, shuffle=False) if sizes is not None else None
    log, told = logging.getLogger("lightning.pytorch.utilities.rank_zero"), Lines()
    log.addHandler(told)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        size = module.batch // (sizes or {"num_replicas": 1})["num_replicas"]
        loader = DataLoader(data, batch_size=size, sampler=sampler)
        trainer.fit(module, loader, loader if isinstance(module, Validates) else None)
    log.removeHandler(told)
    return module.found, [*(str(each.message) for each in said), *told.lines]


PP: dict[str, Any] = {"pipeline_parallel_size": 2, "micro_batch_size": 2}


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("name", "devices", "options"),
    [
        ("OfBatches", 2, PP),
        ("Net", 2, PP),
        ("Sized", 2, PP),
        ("Told", 2, PP),
        ("ToldOfTargets", 2, PP),
        pytest.param("Told", 1, {"micro_batch_size": 4}, marks=WIDE),
        pytest.param("ToldOfTargets", 1, {"micro_batch_size": 4}, marks=WIDE),
        pytest.param("ToldOfTargets", 2, {**PP, "pipeline_schedule": "zb-v"}, marks=WIDE),
        pytest.param("ToldOfTargets", 4, {**PP, "tensor_parallel_size": 2}, marks=WIDE),
        pytest.param("Sized", 1, {"micro_batch_size": 2}, marks=WIDE),
        pytest.param("OfBatches", 1, {"micro_batch_size": 2}, marks=WIDE),
        pytest.param("Net", 1, {"micro_batch_size": 2}, marks=WIDE),
        pytest.param("OfBatches", 2, {**PP, "pipeline_schedule": "zb-v"}, marks=WIDE),
        pytest.param("Net", 2, {}, marks=WIDE),
        pytest.param("Validates", 2, {}, marks=WIDE),
        pytest.param("Validates", 4, PP, marks=WIDE),
        ("Scored", 2, {}),
        ("Scored", 4, PP),
        pytest.param("Scored", 2, {"micro_batch_size": 2}, marks=WIDE),
        ("Tracked", 2, PP),
        pytest.param("Tracked", 4, PP, marks=WIDE),
        ("OfTokens", 2, {"context_parallel_size": 2}),
        pytest.param("OfTokens", 4, {"context_parallel_size": 2}, marks=WIDE),
        pytest.param("Scored", 2, PP, marks=WIDE),
    ],
)
def test_metrics_of_a_step_are_those_of_one_process(name: str, devices: int, options: Any) -> None:
    found, wanted = run_trainers(fit, name, options, devices=devices), one_process(fit, name, None)[0]
    whole = any("So that the step is that of one process" in said for said in found[0].value[1])
    assert whole is (name == "OfBatches")
    for each in found:
        assert each.value[0] == pytest.approx(wanted, rel=1e-6)
        assert not any("from the samples of each" in said or "torchmetrics object `" in said for said in each.value[1])


@pytest.mark.parametrize(
    ("name", "wanted", "devices"),
    [
        ("OfBatches", "writes `highest.max_value`", 2),
        ("ValidatesOfBatches", "tells the torchmetrics object `total` a number of the batch", 2),
        pytest.param("LogsHighest", "tells the torchmetrics object `highest` a number of the batch", 2, marks=WIDE),
        pytest.param("LogsHighest", "tells the torchmetrics object `highest` a number of the batch", 4, marks=WIDE),
    ],
)
def test_replicas_say_that_a_metric_is_told_their_own_numbers(name: str, wanted: str, devices: int) -> None:
    said = run_trainers(fit, name, {"pipeline_parallel_size": devices // 2}, devices=devices)[0].value[1]
    assert any(wanted in each for each in said), said


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (1, {"micro_batch_size": 2}),
        pytest.param(2, PP, marks=WIDE),
        pytest.param(2, {}, marks=WIDE),
        pytest.param(4, PP, marks=WIDE),
    ],
)
def test_a_metric_that_takes_parts_of_a_batch_for_logits_is_warned_of(devices: int, options: Any) -> None:
    said = run_trainers(fit, "SomeLogits", options, devices=devices)[0].value[1]
    assert any("metric `accuracy` takes what it is given for logits" in each for each in said), said


@pytest.mark.parametrize(
    ("metric", "parts", "whole", "mixed", "own"),
    [
        (SumMetric(), (1.0, 2.0), 3.0, False, False),
        (SumMetric(), (1.0, 2.0), 1.5, False, False),  # each replica adds its share
        (SumMetric(), (1.0, 2.0), 1.2, True, True),
        (MaxMetric(), (1.0, 2.0), 2.0, False, False),
        (MaxMetric(), (1.0, 2.0), 1.5, True, True),
        (MeanMetric(), (1.0, 2.0), 1.5, False, False),
        (MeanMetric(), (1.0, 2.0), 2.0, True, True),
        (MeanMetric(), (1.0, 2.0), 1.25, False, False),  # weighed by targets
        (CatMetric(), ([1.0], [2.0]), [1.0, 2.0], False, False),
        (CatMetric(), (1.0, 2.0), 1.5, True, True),
        (RunningMean(2), (1.0, 2.0), 1.5, True, False),
    ],
)
def test_a_state_is_mixed_where_parts_do_not_bring_what_the_whole_brings(
    metric: Any, parts: Any, whole: Any, mixed: bool, own: bool
) -> None:
    metric.update(0.5)
    states = MetricStates(nn.ModuleList([metric]))
    before = {state: copy.deepcopy(getattr(metric, state)) for state in metric._reductions}
    for piece, value in enumerate((*parts, whole)):
        for state, earlier in before.items():
            setattr(metric, state, copy.deepcopy(earlier))
        metric.update(torch.as_tensor(value))
        states.note(piece)
    weights = {"sizes": [1.0, 1.0], "targets": [3.0, 1.0]}
    assert bool(states.mixed({2: (0, 1)}, lambda _: weights, cut=True)) is mixed
    assert bool(states.mixed({2: (0, 1)}, lambda _: weights, cut=False)) is own
    told = states.told({2: (0, 1)}, lambda _: weights)
    assert [ways for _, ways in told.values()] == {1.5: [("sizes",)], 1.25: [("targets",)]}.get(
        whole if told else 0.0, []
    )


@pytest.mark.parametrize(("metric", "value"), [(MeanMetric(), 2.5), (SumMetric(), 2.5)])
def test_shares_of_micro_batches_are_those_of_the_batch(metric: Any, value: float) -> None:
    calls = MetricCalls({}, {id(metric): "sizes"})
    of_parts = calls.shares([torch.zeros(3, 2), torch.zeros(1, 2)])
    assert of_parts == [{id(metric): 0.75}, {id(metric): 0.25}] and calls.shares([torch.zeros(4, 2)]) == [{}]
    over_replicas = MetricCalls({}, {id(metric): "sizes"}, total=lambda counts: [count + 4.0 for count in counts])
    assert over_replicas.shares([torch.zeros(4, 2)]) == [{id(metric): 0.5}]
    for shares, number in zip(of_parts, (2.0, 4.0), strict=True):
        calls.begin_micro_batch(shares)
        calls.update(metric, metric.update, (number,), {})
    assert float(metric.compute()) == value
    assert not isinstance(metric, MeanMetric) or float(metric.weight) == 1.0
