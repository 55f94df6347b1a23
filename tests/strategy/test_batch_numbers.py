"""Losses that are divided by a number which the batch brings, and which counts its samples or targets."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from lightning_megatron.strategy.data.batch_numbers import own_counts
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.scenario import Layout, differences, trained_state
from tests.strategy.loss_modules import BATCH, STEPS, Task, dealt, tokens


class Numbered(Task):
    """Its collator counts targets, as a number of Python's; unlike numbers of them from the third step on."""

    def train_dataloader(self) -> DataLoader[Any]:
        x, y = tokens(BATCH * STEPS, padded_from=2 * BATCH)
        return dealt(self, TensorDataset(x, y), collate_fn=self.collated)

    def collated(self, samples: Any) -> Any:
        """A batch."""
        x, y = default_collate(samples)
        return x, y, int((y != -100).sum())

    def loss(self, x: Tensor, y: Tensor, number: Any) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten(), reduction="sum") / number


class InATensor(Numbered):
    """The same, in a tensor without dims."""

    def collated(self, samples: Any) -> Any:
        x, y, number = super().collated(samples)
        return x, y, torch.tensor(number)


class OfSamples(Numbered):
    """Counts the samples."""

    def collated(self, samples: Any) -> Any:
        return *default_collate(samples), len(samples)


class Constant(Numbered):
    """A number that counts nothing: as many on all replicas."""

    def collated(self, samples: Any) -> Any:
        return *default_collate(samples), 7.5


class Pair(NamedTuple):
    """Two of a kind."""

    y: Tensor
    number: int


KINDS = {kind.__name__: kind for kind in (Numbered, InATensor, OfSamples, Constant)}
LAYOUTS: tuple[tuple[Layout, dict[str, Any]], ...] = (((1, 2), {}), ((2, 2), {"micro_batch_size": 2}))


def train(info: RankInfo, layout: Layout | None, kind: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Weights after an epoch."""
    return trained_state(info, layout, arguments, KINDS[kind](), max_epochs=1)


@pytest.mark.everyday(2)
@pytest.mark.parametrize(("layout", "arguments"), LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_one_process(kind: str, layout: Layout, arguments: dict[str, Any]) -> None:
    expected = one_process(train, None, kind, {})
    first = run_trainers(train, layout, kind, arguments, devices=layout[0] * layout[1])[0]
    assert not list(differences("weights", first.value, expected, 1e-9)), first.output
    assert ("is divided by a number of the batch" in first.output) == (kind != "Constant")


def test_numbers_that_count_are_found() -> None:
    y = torch.tensor([[3, 4, -100], [5, -100, -100], [6, 7, 8], [9, 2, 1]])
    batch = {"x": torch.zeros(4, 2), "pair": Pair(y, 9), "size": torch.tensor(4), "step": 3, "name": "a", "on": True}
    assert own_counts(batch) == {("pair", 1): 9.0, ("size",): 4.0}
    assert own_counts({"y": y}) == own_counts({"n": 4}) == {}
