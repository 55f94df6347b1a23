"""Losses over what several masks of integers leave in, of which the first batches show one; and pairs far apart."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_megatron.strategy.loss.trials.masks import Mask, Masks
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.scenario import Layout, differences, trained_state
from tests.strategy.loss_modules import BATCH, CUTS, STEPS, Task, tokens

WIDE = pytest.mark.wide


class TwoComparisons(Task):
    """Words 2 and 3 do not count; the first batch has none of the latter."""

    def samples(self) -> TensorDataset:
        x, y = tokens(BATCH * STEPS, padded_from=BATCH * STEPS)
        y[y == 3] = 4
        y[::3, 1:] = 2
        y[BATCH + 1, 2:] = y[2 * BATCH + 6, 1:] = 3
        return TensorDataset(x, y, torch.arange(len(x)))

    def left_in(self, y: Tensor, numbers: Tensor) -> Tensor:
        """A mask."""
        return (y != 2) & (y != 3)

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        each = F.cross_entropy(self(x).transpose(1, 2), y, reduction="none")
        mask = self.left_in(y, numbers)
        return (each * mask).sum() / mask.sum().clamp(min=1)


class Negated(TwoComparisons):
    """By what is left out, of two comparisons, one of them of numbers that the step computes."""

    def left_in(self, y: Tensor, numbers: Tensor) -> Tensor:
        out = torch.logical_or(y == 2, (numbers // BATCH == 1)[:, None] & (numbers % 3 == 1)[:, None])
        return ~out


class Rows(TwoComparisons):
    """Chooses what counts."""

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        kept = self.left_in(y, numbers)
        return F.cross_entropy(self(x)[kept], y[kept])


class Filled(TwoComparisons):
    """Marks what does not count, as what torch ignores."""

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        targets = torch.where(y > 15, torch.full_like(y, -100), y.masked_fill(y == 2, -100))
        targets[y == 3] = -100
        return self.each(x, targets)


class Sure(Filled):
    """Marks it by comparing floats."""

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        sure = (0.1 * (numbers % (BATCH + 3)).double())[:, None].expand_as(y)
        return self.each(x, y.masked_fill(sure > 0.95, -100))


class Product(TwoComparisons):
    """A mask of the batch, which leaves in all of the first, and a comparison."""

    def samples(self) -> TensorDataset:
        x, y, _ = super().samples().tensors
        mask = torch.ones_like(y)
        mask[BATCH + 3, 2:] = 0
        return TensorDataset(x, y, mask)

    def left_in(self, y: Tensor, numbers: Tensor) -> Tensor:
        return numbers * (y != 2)


class Texts(TwoComparisons):
    """A mean over texts that are not empty, where all of the first batch's have words."""

    def samples(self) -> TensorDataset:
        x, y, _ = super().samples().tensors
        mask = torch.ones_like(y)
        mask[BATCH + 3] = 0
        return TensorDataset(x, y, mask)

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        each = F.cross_entropy(self(x).transpose(1, 2), y, reduction="none")
        lengths = numbers.sum(1)
        return ((each * numbers).sum(1)[lengths > 0] / lengths[lengths > 0]).mean()


class Ranked(Texts):
    """The same, of texts whose mask has any."""

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        each = F.cross_entropy(self(x).transpose(1, 2), y, reduction="none")
        return (each * numbers).mean(1)[(numbers == 1).any(1)].mean()


class Acquainted(TwoComparisons):
    """Persons of whom there is another one in the batch, of which the first batches have none."""

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        persons = torch.where((numbers // BATCH == 1) & (numbers % 4 == 0), BATCH, numbers)
        logits = self(x)
        each = F.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1)
        known = ((persons[:, None] == persons[None]) & ~torch.eye(len(x), dtype=torch.bool)).any(1)
        return each.mean() + 2 * each[known].mean() if known.any() else each.mean()


class FarApart(Task):
    """Two samples of a person, 16 of 40 apart, have a loss together."""

    def train_dataloader(self) -> DataLoader[Any]:
        x, y = tokens(80)
        samples = TensorDataset(x, y, torch.arange(len(x)) % 16)
        options = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        own = 40 // options["num_replicas"]
        chosen = [at for at in range(len(samples)) if at % 40 // own == options["rank"]]
        return DataLoader(Subset(samples, chosen), batch_size=own)

    def loss(self, x: Tensor, y: Tensor, persons: Tensor) -> Tensor:  # type: ignore[override]
        logits = self(x)
        sums = torch.zeros(16, logits.shape[-1], dtype=logits.dtype).index_add(0, persons, logits.mean(1))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + 0.1 * sums.square().sum() / len(x)


class Partners(FarApart):
    """The same by pairs."""

    def loss(self, x: Tensor, y: Tensor, persons: Tensor) -> Tensor:  # type: ignore[override]
        logits = self(x)
        z = F.normalize(logits.mean(1), dim=-1)
        same = (persons[:, None] == persons[None]) & ~torch.eye(len(z), dtype=torch.bool)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + (z @ z.T * same).sum() / len(z)


class MetLater(TwoComparisons):
    """Sums by person; in the third batch two samples are of one, in the first and second half."""

    def samples(self) -> TensorDataset:
        x, y, numbers = super().samples().tensors
        numbers[3 * BATCH - 1] = numbers[2 * BATCH + 1]
        return TensorDataset(x, y, numbers)

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        logits = self(x)
        sums = F.one_hot(numbers, BATCH * STEPS).to(logits).T @ logits.mean(1)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + 0.1 * sums.square().sum() / len(x)


class Persons(MetLater):
    """Divides by how many persons there are, which Python counts."""

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        each = F.cross_entropy(self(x).transpose(1, 2), y, reduction="none").mean(1)
        return each.sum() / len(set(numbers.tolist()))


class ByTheLongest(TwoComparisons):
    """Decides by a number of the batch's integers, in a tensor."""

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        loss = self.each(x, y)
        return 2 * loss if (numbers % 13).max() > 11 else loss


class ByTheSum(TwoComparisons):
    """Decides by a number of Python's that is the sum of the batch's integers."""

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        loss = self.each(x, y)
        return 2 * loss if (numbers % 13).sum().item() > 55 else loss


class ByAnInteger(ByTheSum):
    """The same, of a name."""

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        loss, total = self.each(x, y), int((numbers % 13).sum())
        if total > 55:
            loss = 2 * loss
        return loss


class OfKinds(TwoComparisons):
    """Takes the words that a batch has one after the other; the first batches have none of one."""

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        each, more = F.cross_entropy(self(x).transpose(1, 2), y, reduction="none"), torch.zeros(()).double()
        for word in sorted(set(y.flatten().tolist())):
            if word == 3:
                more = more + each[y == word].mean()
        return each.mean() + more


class Listed(TwoComparisons):
    """Chooses samples in Python."""

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        kept = [place for place, number in enumerate(numbers.tolist()) if number != BATCH + 2]
        return self.each(x[kept], y[kept]) if len(kept) == 0 else F.cross_entropy(self(x)[kept].mT, y[kept])


class Lengths(TwoComparisons):
    """Divides by lengths that the batch brings."""

    def samples(self) -> TensorDataset:
        x, y, numbers = super().samples().tensors
        return TensorDataset(x, y, 1 + numbers % 5)

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        each = F.cross_entropy(self(x).transpose(1, 2), y, reduction="none")
        return (each * (torch.arange(y.shape[1])[None] < numbers[:, None])).sum() / numbers.sum()


class OneMask(TwoComparisons):
    """Words alone that are counted: nothing runs whole."""

    def left_in(self, y: Tensor, numbers: Tensor) -> Tensor:
        if max(1, int((y != 2).sum())) < 1 or (y != 2).sum().item() == 0 or int(numbers.max()) == 0:
            raise ValueError("no words")
        first = torch.arange(int(y.max()) + 1) < y.max()
        return (y != 2) & first.any()


MASKS = (TwoComparisons, Negated, Rows, Filled, Sure, Product, Texts, Ranked, Acquainted, ByTheLongest, Listed)
DECIDED = (ByTheSum, ByAnInteger, OfKinds, MetLater, Persons)
COUNTED = ("OneMask", "Lengths")
KINDS = {kind.__name__: kind for kind in (*MASKS, *DECIDED, FarApart, Partners, OneMask, Lengths)}
EVERY = ("TwoComparisons", "Filled", "FarApart")


def train(info: RankInfo, layout: Layout | None, kind: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Weights after an epoch."""
    return trained_state(info, layout, arguments, KINDS[kind](), max_epochs=1)


@pytest.mark.parametrize(
    ("kind", "layout", "arguments"),
    [
        pytest.param(kind, layout, arguments, marks=() if kind in EVERY and at == 0 else WIDE)
        for kind in KINDS
        for at, (layout, arguments) in enumerate(CUTS)
    ],
    ids=str,
)
def test_weights_are_those_of_one_process(kind: str, layout: Layout, arguments: dict[str, Any]) -> None:
    expected = one_process(train, None, kind, {})
    size = {"micro_batch_size": 2} if kind in ("FarApart", "Partners") else {}
    first = run_trainers(train, layout, kind, {**arguments, **size}, devices=layout[0] * layout[1])[0]
    assert not list(differences("weights", first.value, expected, 1e-9)), first.output
    assert ("weighted by their number of these" in re.sub(r"\s+", " ", first.output)) == (kind in COUNTED)


@pytest.mark.everyday(2)
@pytest.mark.parametrize("layout", [(1, 2), (2, 2)])
@pytest.mark.parametrize(
    "kind",
    [
        *("TwoComparisons", "Sure", "Product", "FarApart", "Partners"),
        *("Ranked", "Acquainted", "ByTheSum", "ByAnInteger", "OfKinds", "MetLater", "Persons"),
    ],
)
def test_replicas_are_told(kind: str, layout: Layout) -> None:
    arguments = {"micro_batch_size": "auto" if layout[0] == 1 else 2}
    ranks = layout[0] * layout[1]
    outcomes = run_trainers(train, layout, kind, arguments, devices=ranks, check=False, grace=20.0)
    said = r"Each of the 2 replicas (has that number of its own samples|computes it over its own)"
    assert re.search(said, re.sub(r"\s+", " ", f"{outcomes[0].error}")), outcomes[0].output


@pytest.mark.everyday(1)
@pytest.mark.parametrize("layout", [(1, 2), (2, 2)])
@pytest.mark.parametrize("kind", COUNTED)
def test_what_is_counted_is_counted_over_replicas(layout: Layout, kind: str) -> None:
    expected = one_process(train, None, kind, {})
    arguments = {"micro_batch_size": "auto" if layout[0] == 1 else 2}
    first = run_trainers(train, layout, kind, arguments, devices=layout[0] * layout[1])[0]
    assert not list(differences("weights", first.value, expected, 1e-9)), first.output


def test_masks_that_were_met_both_ways_have_told() -> None:
    counted, computed = Mask("y != 2", True), Mask("y // 8 == 1", False)
    met = Masks(frozenset(), (("bend", frozenset([counted, computed])),))
    assert met.untold(settled=False) == met.untold(settled=True) == "bend"
    told = met.joined([Masks(frozenset([computed.name]))])
    assert told.untold(settled=False) is None
    assert told.untold(settled=True) == "bend"
    assert told.joined([Masks(frozenset([counted.name]))]).untold(settled=True) is None
