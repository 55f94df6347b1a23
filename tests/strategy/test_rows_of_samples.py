"""State that a step keeps of each sample for the next batch, as where long sequences are cut into batches."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron.strategy.carried.rows_of_samples import are_own_rows, sample_dims
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.scenario import Layout, differences, trained_state
from tests.strategy.loss_modules import BATCH, STEPS, Task, dealt, tokens


class Recurrent(Task):
    """Goes on from the state of a torch layer, whose samples lie along dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = self.made().double()
        self.state: Any = None

    def made(self) -> nn.Module:
        """The layer."""
        return nn.GRU(8, 8, batch_first=True)

    def train_dataloader(self) -> DataLoader[Any]:
        return dealt(self, TensorDataset(*tokens(BATCH * STEPS)))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out, self.state = self.cell(F.one_hot(x % 8, 8).double(), self.state)
        self.state = self.detached(self.state)
        return F.cross_entropy(self(x)[:, -1], y[:, 0], reduction="none").mean() + out.square().mean()

    def detached(self, state: Any) -> Any:
        """The state without its graph."""
        return state.detach()


class OfTwo(Recurrent):
    """An LSTM's, of two tensors."""

    def made(self) -> nn.Module:
        return nn.LSTM(8, 8, 2, batch_first=True)

    def detached(self, state: Any) -> Any:
        return tuple(each.detach() for each in state)


class Shared(Recurrent):
    """Each sample goes on from the mean of all."""

    def detached(self, state: Any) -> Any:
        return state.detach().mean(1, keepdim=True).expand_as(state).contiguous()


SHARED = Shared.__name__
KINDS = {kind.__name__: kind for kind in (Recurrent, OfTwo, Shared)}


def train(info: RankInfo, layout: Layout | None, kind: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Weights after an epoch."""
    return trained_state(info, layout, arguments, KINDS[kind](), max_epochs=1)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("layout", [(1, 2), (2, 2)])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != SHARED])
def test_weights_are_those_of_one_process(kind: str, layout: Layout) -> None:
    expected = one_process(train, None, kind, {})
    arguments = {"micro_batch_size": "auto" if layout[0] == 1 else 2}
    first = run_trainers(train, layout, kind, arguments, devices=layout[0] * layout[1])[0]
    assert not list(differences("weights", first.value, expected, 1e-9)), first.output


@pytest.mark.wide
def test_rows_that_are_made_of_all_samples_are_refused() -> None:
    for outcome in run_trainers(
        train, (1, 2), SHARED, {"micro_batch_size": "auto"}, devices=2, check=False, grace=20.0
    ):
        said = re.sub(r"\s+", " ", str(outcome.error))
        assert "writes `state` from the samples of a batch and goes on from it, and the replicas cannot" in said


def test_rows_are_those_of_the_whole_or_mixed() -> None:
    rows = torch.arange(8.0).view(1, 4, 2)
    halves = [rows[:, :2], rows[:, 2:]]
    assert are_own_rows(halves, rows, 1)
    assert not are_own_rows(halves, rows.mean(1, keepdim=True).expand_as(rows), 1)
    assert are_own_rows([(each, each) for each in halves], (rows, rows), (1, 1))
    assert not are_own_rows([(each, each) for each in halves], (rows, rows + 1), (1, 1))


def test_samples_lie_where_lengths_add_up() -> None:
    one, both = torch.zeros(1, 2, 8), torch.zeros(1, 4, 8)
    assert sample_dims([one, one], both) == 1
    assert sample_dims([(one, one), (one, one)], (both, both)) == (1, 1)
    assert sample_dims([torch.zeros(3), torch.zeros(2)], torch.zeros(5)) == 0
    assert sample_dims([both, both], both) is None
    assert sample_dims([(one, 1.0), (one, 2.0)], (both, 3.0)) is None
    assert sample_dims([None, one], both) is None
    assert sample_dims([[one], [one]], [both]) is None
