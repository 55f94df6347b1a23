"""Keys that a condition lets some replicas or micro-batches log, and others not, are those of one process."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_megatron.strategy.lightning.hooks import logs_itself
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.scenario import Layout, differences, trainer_for
from tests.strategy.loss_modules import BATCH, STEPS, Task, tokens

WIDE = pytest.mark.wide


class Sources(Task):
    """Logs the loss of each source that a batch has, with how many samples are from it."""

    sized, metric = True, False

    def __init__(self) -> None:
        super().__init__()
        self.highest = torchmetrics.MaxMetric().set_dtype(torch.float64)

    def sources(self, count: int) -> Tensor:
        """Of each sample; some batches have one, some two."""
        return (torch.arange(count) // 3 % 2) * (torch.arange(count) % 5 > 0)

    def loader(self, seed: int) -> DataLoader[Any]:
        samples = TensorDataset(*tokens(BATCH * STEPS, seed=seed), self.sources(BATCH * STEPS))
        options = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        own = BATCH // options["num_replicas"]
        chosen = [at for at in range(len(samples)) if at % BATCH // own == options["rank"]]
        return DataLoader(Subset(samples, chosen), batch_size=own)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(0)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(3)

    def step(self, batch: Any, prefix: str) -> Tensor:
        x, y, source = batch
        each = self.each(x, y, reduction="none").view(len(x), -1).mean(1)
        for number in range(2):
            own = source == number
            if own.any():
                size = int(own.sum()) if self.sized else None
                self.log(f"{prefix}loss/{number}", each[own].mean(), batch_size=size, on_step=True, on_epoch=True)
                self.log(f"{prefix}samples/{number}", own.sum().double(), reduce_fx="sum", on_step=False, on_epoch=True)
        return each.mean()

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        return self.step(batch, "")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch, "val_")


class OfReplicas(Sources):
    """Samples of a replica are from one source, so each logs other keys; as many of them."""

    sized = False

    def sources(self, count: int) -> Tensor:
        return torch.arange(count) % BATCH // (BATCH // 2)


class OnlyOne(OfReplicas):
    """One replica logs nothing, in some batches none does."""

    def step(self, batch: Any, prefix: str) -> Tensor:
        x, y, source = batch
        each = self.each(x, y, reduction="none")
        if (source == 1).any() and self.global_step % 4 != 1:
            self.log(f"{prefix}worst", each.view(len(x), -1)[source == 1].max(), reduce_fx="max")
        return each.mean()


class OfMetric(OfReplicas):
    """A metric's value, of one replica only; and one of both."""

    def step(self, batch: Any, prefix: str) -> Tensor:
        x, y, source = batch
        each = self.each(x, y, reduction="none").view(len(x), -1)
        if (source == 1).any():
            self.log(f"{prefix}highest", self.highest(each.detach()[source == 1]), on_step=True, on_epoch=False)
        return each.mean()


class InHook(OfReplicas):
    """Logs by the sources of a batch in a hook, from what the step has just made."""

    def step(self, batch: Any, prefix: str) -> Tensor:
        x, y, source = batch
        self.found = source.unique().tolist()
        return self.each(x, y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for number in self.found:
            self.log(f"of/{number}", 1.0)


class AtTheEnd(OfReplicas):
    """Keeps losses by source, and logs those of each at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, list[Tensor]] = {}

    def step(self, batch: Any, prefix: str) -> Tensor:
        x, y, source = batch
        loss = self.each(x, y)
        for number in source.unique().tolist():
            self.kept.setdefault(number, []).append(loss.detach())
        return loss

    def on_validation_epoch_end(self) -> None:
        for number, losses in self.kept.items():
            self.log(f"of/{number}", torch.stack(losses).mean())
        self.kept.clear()


class OnEveryRank(InHook):
    """Logs the same keys everywhere, in a loop."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for number in range(2):
            self.log(f"of/{number}", 1.0)


class Unsaid(OfReplicas):
    """May mean over some samples of those that log."""


KINDS = (Sources, OfReplicas, OnlyOne, OfMetric, InHook, AtTheEnd, OnEveryRank, Unsaid)
MODULES: dict[str, type[Sources]] = {kind.__name__: kind for kind in KINDS}


def ran(info: RankInfo, layout: Layout | None, name: str, arguments: Mapping[str, Any]) -> Any:
    """What training and validation have logged."""
    if name == "OfReplicas":  # which the warning cannot know
        warnings.filterwarnings("ignore", "what `self.log` is given as .* is logged for some parts of a batch")
    trainer = trainer_for(info, layout, arguments, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(MODULES[name]())
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


LAYOUTS: list[tuple[Layout, dict[str, Any]]] = [
    ((1, 2), {"micro_batch_size": "auto"}),
    ((2, 2), {}),
    ((2, 1), {}),
    ((1, 4), {"micro_batch_size": "auto"}),
    ((1, 2), {"micro_batch_size": "auto", "tensor_parallel_size": 2}),
    ((1, 2), {"micro_batch_size": "auto", "weight_sharding": True}),
]
EVERYDAY = [("Sources", 0), ("OfReplicas", 1), ("OnlyOne", 0)]
ROWS = [
    pytest.param(name, layout, arguments, marks=() if (name, number) in EVERYDAY else WIDE)
    for name in ("Sources", "OfReplicas", "OnlyOne", "OfMetric")
    for number, (layout, arguments) in enumerate(LAYOUTS)
    if (name, layout[1]) != ("OfMetric", 4)
]


@pytest.mark.parametrize(("name", "layout", "arguments"), ROWS, ids=str)
def test_keys_of_some_parts_of_a_batch_are_logged_on_all_ranks(
    name: str, layout: Layout, arguments: Mapping[str, Any]
) -> None:
    expected = one_process(ran, None, name, {})
    ranks = layout[0] * layout[1] * arguments.get("tensor_parallel_size", 1)
    for found in run_trainers(ran, layout, name, arguments, devices=ranks):
        assert not list(differences("logged", found.value, expected, 1e-9)), found.output


@pytest.mark.parametrize("layout", [pytest.param((1, 2), id="dp2"), pytest.param((2, 1), id="pp2", marks=WIDE)])
def test_means_over_some_samples_of_some_parts_are_named(layout: Layout) -> None:
    found = run_trainers(ran, layout, "Unsaid", {}, devices=layout[0] * layout[1], check=False, grace=20.0)
    said = r"`loss/\d` \(.*test_some_log.py:\d+\).* is logged for some parts of a batch"
    assert re.search(said, f"{found[0].error}{found[0].output}"), found[0].error


@WIDE
def test_metrics_that_two_of_four_replicas_call_are_named() -> None:
    found = run_trainers(ran, (1, 4), "OfMetric", {"micro_batch_size": "auto"}, devices=4, check=False, grace=20.0)
    said = r"the metric behind `highest` \(.*test_some_log.py:\d+\) was called by 2 of 4 replicas"
    assert re.search(said, f"{found[0].error}{found[0].output}"), found[0].error


class Steps:
    """Steps by what their code names."""

    def logs(self, batch: Any, sizes: tuple[int, ...] = ()) -> None:
        self.log("sum", batch.sum(() or None))  # type: ignore[attr-defined]

    def logs_in_a_function(self, batch: Any) -> None:
        def tell(name: str) -> None:
            self.log(name, batch)  # type: ignore[attr-defined]

        tell("sum")

    def takes_logarithms(self, batch: Any) -> Any:
        return torch.log(batch).reshape(()), batch.log()


@pytest.mark.parametrize(("step", "logs"), [("logs", True), ("logs_in_a_function", True), ("takes_logarithms", False)])
def test_code_that_logs_is_told_from_code_that_takes_logarithms(step: str, logs: bool) -> None:
    assert logs_itself(Steps(), step) == logs


@pytest.mark.parametrize(
    ("name", "layout", "arguments", "keys"),
    [
        ("InHook", (1, 2), {"micro_batch_size": "auto"}, "`on_train_batch_end` logs `of/0`, `of/1` on some of the 2"),
        pytest.param("InHook", (2, 2), {}, "`on_train_batch_end` logs `of/0`, `of/1` on some of the 2", marks=WIDE),
        pytest.param("AtTheEnd", (1, 2), {"micro_batch_size": "auto"}, "`on_validation_epoch_end` logs", marks=WIDE),
    ],
    ids=str,
)
def test_keys_that_hooks_log_on_some_replicas_only_are_refused_on_all_ranks(
    name: str, layout: Layout, arguments: Mapping[str, Any], keys: str
) -> None:
    ranks = layout[0] * layout[1]
    for outcome in run_trainers(ran, layout, name, arguments, devices=ranks, check=False, grace=20.0):
        assert keys in f"{outcome.error}", outcome.error


@pytest.mark.parametrize("layout", [(1, 2), pytest.param((2, 2), marks=WIDE)], ids=str)
def test_a_loop_over_the_same_keys_logs_them(layout: Layout) -> None:
    for outcome in run_trainers(ran, layout, "OnEveryRank", {}, devices=layout[0] * layout[1]):
        assert outcome.value["of/0"] == outcome.value["of/1"] == 1.0
