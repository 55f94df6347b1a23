"""Hooks that are given a batch: over replicas they see the samples of all, where it matters."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.scenario import Layout, differences, trained_state
from tests.strategy.loss_modules import BATCH, STEPS, Task, dealt, tokens

Batch = list[Tensor]


class Weighed(Task):
    """Each sample has a number, by which hooks and the loss do something; the data are cut as one process's batches."""

    scale: Any = 1.0

    def train_dataloader(self) -> DataLoader[Any]:
        x, y = tokens(BATCH * STEPS)
        return dealt(self, TensorDataset(x, y, torch.arange(len(x), dtype=torch.float64).sin()))

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        each = F.cross_entropy(self(x).transpose(1, 2), y, reduction="none").mean(1)
        return ((1 + numbers) * each).mean() * self.scale


class Centred(Weighed):
    """Sets the batch's numbers off against their mean, on the way to the device."""

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return [*batch[:2], batch[2] - batch[2].mean()]


class CentredInPlace(Weighed):
    """The same, in the batch that it is given."""

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        batch[2] -= batch[2].mean()


class Scaled(Weighed):
    """Follows the batch's numbers at the end of each step."""

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.scale = 0.9 * self.scale + 0.1 * float(batch[2].abs().max())


class Counting(Weighed):
    """Counts samples at the start of each step."""

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.scale += len(batch[0]) / 100


class Drawing(Weighed):
    """Draws for each sample; is left alone, and does nothing in the end."""

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return [*batch[:2], batch[2] + 0 * torch.rand_like(batch[2])]


class BySample(Weighed):
    """Does something for each sample; is left alone."""

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return [*batch[:2], 2 * batch[2]]


class Centre(Callback):
    """Does it for a module."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Batch, batch_idx: int) -> None:
        batch[2] -= batch[2].mean()


class CentredByCallback(Weighed):
    """A callback of the user's mixes the samples."""

    def configure_callbacks(self) -> list[Callback]:
        return [Centre()]


class Centring(LightningDataModule):
    """Data that set the numbers of a batch off against a running mean."""

    mean: Any = 0.0

    def __init__(self, module: Weighed) -> None:
        super().__init__()
        self.loader = module.train_dataloader

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader()

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        self.mean = 0.5 * self.mean + 0.5 * batch[2].mean()
        return [*batch[:2], batch[2] - self.mean]


class CentredByData(Weighed):
    """A data module mixes the samples."""


class CentredLater(Weighed):
    """Mixes the samples of batches that are evaluated."""

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("validated", self.loss(*batch))

    def on_validation_batch_start(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        batch[2] = batch[2] - batch[2].mean()


def centred(samples: list[Any]) -> Batch:
    x, y, numbers = default_collate(samples)
    return [x, y, numbers - numbers.mean()]


def doubled(samples: list[Any]) -> Batch:
    x, y, numbers = default_collate(samples)
    return [x, y, 2 * numbers]


class Collated(Weighed):
    """Sets them off where samples become a batch."""

    collate: Any = staticmethod(centred)

    def train_dataloader(self) -> DataLoader[Any]:
        loader = super().train_dataloader()
        loader.collate_fn = self.collate
        return loader


class CollatedBySample(Collated):
    """Doubles each."""

    collate = staticmethod(doubled)


class Unlike(Centred):
    """Replicas whose batches are of unlike lengths."""

    def train_dataloader(self) -> DataLoader[Any]:
        def cut(samples: Any) -> list[Tensor]:
            x, y, numbers = (torch.stack(each) for each in zip(*samples, strict=True))
            length = 3 + int(numbers[0] > 0.5)
            return [x[:, :length], y[:, :length], numbers]

        loader = super().train_dataloader()
        return DataLoader(loader.dataset, batch_size=loader.batch_size, collate_fn=cut)


SHARED = (Centred, CentredInPlace, Scaled, Counting, CentredByCallback, CentredByData)
ALONE = (CentredLater, Collated, CollatedBySample)
KINDS = {kind.__name__: kind for kind in (*SHARED, Drawing, BySample, Unlike, *ALONE)}

LAYOUTS: tuple[tuple[Layout, dict[str, Any]], ...] = (((1, 2), {}), ((2, 2), {"micro_batch_size": 2}))


def train(info: RankInfo, layout: Layout | None, kind: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Weights after an epoch."""
    module = KINDS[kind]()
    data = Centring(module) if isinstance(module, CentredByData) else None
    return trained_state(info, layout, arguments, module, data, max_epochs=1)


@pytest.mark.everyday(2)
@pytest.mark.parametrize(("layout", "arguments"), LAYOUTS)
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind not in (Unlike, *ALONE)])
def test_weights_are_those_of_one_process(kind: str, layout: Layout, arguments: dict[str, Any]) -> None:
    expected = one_process(train, None, kind, {})
    first = run_trainers(train, layout, kind, arguments, devices=layout[0] * layout[1])[0]
    assert not list(differences("weights", first.value, expected, 1e-9)), first.output
    told = "is given the samples of all 2 replicas" in re.sub(r"\s+", " ", first.output)
    assert told == (KINDS[kind] in SHARED), first.output


@pytest.mark.wide
def test_batches_that_cannot_be_put_together_are_refused() -> None:
    outcomes = run_trainers(train, (1, 2), "Unlike", {}, devices=2, check=False, grace=20.0)
    assert "of unlike sizes" in re.sub(r"\s+", " ", f"{outcomes[0].error}"), outcomes[0].output


@pytest.mark.wide
def test_hooks_that_mix_the_samples_of_batches_in_evaluation_are_warned_of() -> None:
    for outcome in run_trainers(train, (1, 2), "CentredLater", {}, devices=2, check=False, grace=20.0)[:1]:
        said = re.sub(r"\s+", " ", f"{outcome.error} {outcome.output}")
        assert "`on_validation_batch_start` (" in said and "what depends on the others in it" in said


@pytest.mark.wide
def test_collators_that_mix_the_samples_of_a_batch_are_warned_of() -> None:
    arguments: dict[str, Any] = {"micro_batch_size": "auto"}
    for kind, told in (("Collated", True), ("CollatedBySample", False)):
        first = run_trainers(train, (1, 2), kind, arguments, devices=2, check=False, grace=20.0)[0]
        assert ("`centred`, `collate_fn` of a training loader, makes of each" in str(first.error)) == told, kind


def test_each_replica_has_its_own_where_that_is_meant() -> None:
    expected = one_process(train, None, "Centred", {})
    first = run_trainers(train, (1, 2), "Centred", {"whole_batch_loss": False}, devices=2)[0]
    assert list(differences("weights", first.value, expected, 1e-9))
