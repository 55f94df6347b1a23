"""Metrics that are told numbers of a batch are told them once per batch; wrapped ones are computed on all stages."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import Accuracy, CatMetric, MaxMetric, MeanMetric, SumMetric
from torchmetrics.aggregation import RunningMean

from lightning_megatron import MegatronStrategy
from lightning_megatron.strategy.hooks.metric_states import MetricStates
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


KINDS = {kind.__name__: kind for kind in (Net, OfBatches, Sized)}


def fit(info: RankInfo, name: str, options: dict[str, Any] | None) -> tuple[list[float], list[str]]:
    """What the metrics give behind an epoch of three batches, and warnings."""
    torch.manual_seed(2)
    module = KINDS[name]().double()
    for metric in (module.highest, module.total, module.mean, module.latest, module.all):
        metric.set_dtype(torch.float64)
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(24, 8, generator=generator).double(), torch.randint(0, CLASSES, (24,), generator=generator)
    )
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    trainer = make_trainer(info, strategy, max_epochs=1, precision="64-true")
    sizes = getattr(trainer.strategy, "distributed_sampler_kwargs", None) if options is not None else None
    sampler = DistributedSampler(data, **sizes, shuffle=False) if sizes is not None else None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        size = module.batch // (sizes or {"num_replicas": 1})["num_replicas"]
        trainer.fit(module, DataLoader(data, batch_size=size, sampler=sampler))
    return module.found, [str(each.message) for each in said]


PP: dict[str, Any] = {"pipeline_parallel_size": 2, "micro_batch_size": 2}


@pytest.mark.parametrize(
    ("name", "devices", "options"),
    [
        ("OfBatches", 2, PP),
        ("Net", 2, PP),
        ("Sized", 2, PP),
        pytest.param("Sized", 1, {"micro_batch_size": 2}, marks=WIDE),
        pytest.param("OfBatches", 1, {"micro_batch_size": 2}, marks=WIDE),
        pytest.param("Net", 1, {"micro_batch_size": 2}, marks=WIDE),
        pytest.param("OfBatches", 2, {**PP, "pipeline_schedule": "zb-v"}, marks=WIDE),
        pytest.param("Net", 2, {}, marks=WIDE),
    ],
)
def test_metrics_of_a_step_are_those_of_one_process(name: str, devices: int, options: Any) -> None:
    found, wanted = run_trainers(fit, name, options, devices=devices), one_process(fit, name, None)[0]
    for each in found:
        assert each.value[0] == pytest.approx(wanted, rel=1e-6)
        assert not any("from the samples of each" in said for said in each.value[1])


def test_replicas_say_that_a_metric_is_told_their_own_numbers() -> None:
    said = run_trainers(fit, "OfBatches", {}, devices=2)[0].value[1]
    assert any("writes `highest.max_value`" in each for each in said), said


@pytest.mark.parametrize(
    ("metric", "parts", "whole", "mixed"),
    [
        (SumMetric(), (1.0, 2.0), 3.0, False),
        (SumMetric(), (1.0, 2.0), 1.5, True),
        (MaxMetric(), (1.0, 2.0), 2.0, False),
        (MaxMetric(), (1.0, 2.0), 1.5, True),
        (MeanMetric(), (1.0, 2.0), 1.5, False),
        (MeanMetric(), (1.0, 2.0), 2.0, True),
        (CatMetric(), ([1.0], [2.0]), [1.0, 2.0], False),
        (CatMetric(), (1.0, 2.0), 1.5, True),
        (RunningMean(2), (1.0, 2.0), 1.5, True),
    ],
)
def test_a_state_is_mixed_where_parts_do_not_bring_what_the_whole_brings(
    metric: Any, parts: Any, whole: Any, mixed: bool
) -> None:
    metric.update(0.5)
    states = MetricStates(nn.ModuleList([metric]))
    before = {state: copy.deepcopy(getattr(metric, state)) for state in metric._reductions}
    for piece, value in enumerate((*parts, whole)):
        for state, earlier in before.items():
            setattr(metric, state, copy.deepcopy(earlier))
        metric.update(torch.as_tensor(value))
        states.note(piece)
    assert bool(states.mixed({2: (0, 1)}, cut=True)) is mixed
    assert not states.mixed({2: (0, 1)}, cut=False) or mixed
