"""Losses of batches that each replica pads to the longest of its own samples."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_megatron.strategy.loss.trials.padding import length_of, shortest_of
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.scenario import Layout, differences, trained_state
from tests.strategy.loss_modules import BATCH, STEPS, Task, tokens

WIDE = pytest.mark.wide
SPLIT = [((2, 2), {"micro_batch_size": 2}), ((1, 2), {"micro_batch_size": 2}), ((1, 2), {"micro_batch_size": "auto"})]


def padded_to_longest(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A batch of samples, with zeros where they end."""
    x, y = (torch.nn.utils.rnn.pad_sequence(each, batch_first=True) for each in zip(*samples, strict=True))
    return x, y


class PerSample(Task):
    """The mean over samples of the mean over the tokens of each, whatever follows them."""

    def train_dataloader(self) -> DataLoader[Any]:
        lengths = [2 + at * 3 % 5 for at in range(BATCH * STEPS)]
        samples: Any = [(x[:n], y[:n]) for x, y, n in zip(*tokens(len(lengths)), lengths, strict=True)]
        options = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        own = BATCH // options["num_replicas"]
        chosen = [at for at in range(len(samples)) if at % BATCH // own == options["rank"]]
        return DataLoader(Subset(samples, chosen), batch_size=own, collate_fn=padded_to_longest)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        mask = y != 0
        each = F.cross_entropy(self(x).transpose(1, 2), y, reduction="none") * mask
        return self.total(each, mask)

    def total(self, each: Tensor, mask: Tensor) -> Tensor:
        """The loss."""
        return (each.sum(1) / mask.sum(1)).mean()


class PerTokens(PerSample):
    """The mean over the tokens that there are."""

    def total(self, each: Tensor, mask: Tensor) -> Tensor:
        return each.sum() / mask.sum()


class PerNumbers(PerSample):
    """The mean over what there is, padding included."""

    def total(self, each: Tensor, mask: Tensor) -> Tensor:
        return each.sum() / each.numel()


KINDS = {kind.__name__: kind for kind in (PerSample, PerTokens, PerNumbers)}


def train(info: RankInfo, layout: Layout | None, kind: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Weights after an epoch."""
    return trained_state(info, layout, arguments, KINDS[kind](), max_epochs=1)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("layout", "arguments"), SPLIT)
def test_means_over_padding_are_named(layout: Layout, arguments: dict[str, Any]) -> None:
    ranks = layout[0] * layout[1]
    outcomes = run_trainers(train, layout, "PerNumbers", arguments, devices=ranks, check=False, grace=20.0)
    said = r"for a sample that is padded to \d, .* pads to the longest of all|nor joined with that of another replica"
    assert re.search(said, f"{outcomes[0].error}"), outcomes[0].output


@WIDE
@pytest.mark.parametrize(("layout", "arguments"), SPLIT[:2])
@pytest.mark.parametrize("kind", ["PerSample", "PerTokens"])
def test_means_over_what_counts_are_those_of_one_process(kind: str, layout: Layout, arguments: dict[str, Any]) -> None:
    expected = one_process(train, None, kind, {})
    first = run_trainers(train, layout, kind, arguments, devices=layout[0] * layout[1])[0]
    assert not list(differences("weights", first.value, expected, 1e-9)), first.output


def test_the_sample_with_most_padding_is_cut_to_its_own_length() -> None:
    tokens_of = torch.tensor([[3, 4, 5, 6, 7], [3, 4, 9, 9, 9], [3, 4, 5, 9, 9]])
    labels = torch.tensor([[3, 4, 5, 6, 7], [3, 4, -100, -100, -100], [3, 4, 5, -100, -100]])
    batch = {"tokens": tokens_of, "labels": labels, "x": torch.rand(3, 5, 2) * (labels > 0)[:, :, None], "n": [5, 2, 3]}
    short = shortest_of(batch)
    assert length_of(batch) == 5
    assert short is not None
    assert short.length == 5
    assert short.padded["tokens"].tolist() == [[3, 4, 9, 9, 9]]
    assert short.alone["tokens"].tolist() == [[3, 4]]
    assert short.alone["labels"].tolist() == [[3, 4]]
    assert short.alone["x"].shape == (1, 2, 2)
    assert shortest_of({"tokens": tokens_of}) is None  # the 9 may be a word
    assert shortest_of({"x": torch.rand(3)}) is None
