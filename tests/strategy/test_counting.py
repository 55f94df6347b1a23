"""Losses that count samples by comparing floats, of which all samples of the first batch are of one kind."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.scenario import Layout, differences, trained_state
from tests.strategy.loss_modules import BATCH, CUTS, STEPS, VOCABULARY, Task, tokens

WIDE = pytest.mark.wide


class Gaps(Task):
    """Samples have a number each, which some of the later batches lack; these are left out."""

    def samples(self) -> TensorDataset:
        numbers = torch.linspace(0.1, 0.9, BATCH * STEPS, dtype=torch.float64)
        numbers[torch.tensor([BATCH + 1, 2 * BATCH + 6])] = torch.nan
        return TensorDataset(*tokens(BATCH * STEPS, padded_from=BATCH * STEPS), numbers)

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        keep = ~torch.isnan(numbers)
        return F.cross_entropy(self(x)[keep].flatten(0, 1), y[keep].flatten())


class FewerTokens(Gaps):
    """The samples are left out before the layers."""

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        if torch.isnan(numbers).any():
            x, y = x[~numbers.isnan()], y[~numbers.isnan()]
        return self.each(x, y)


class Outliers(Gaps):
    """What lies above a limit does not count."""

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        each = F.cross_entropy(self(x).transpose(1, 2), y, reduction="none").mean(1)
        weights = (numbers < 0.5).double()
        return (each * weights).sum() / weights.sum().clamp(min=1)


class DividedInPython(Gaps):
    """By a number of Python's."""

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        each = F.cross_entropy(self(x).transpose(1, 2), y, reduction="none").mean(1)
        number = numbers.isfinite().sum().item()
        return each.masked_fill(numbers.isnan(), 0).sum() / max(number, 1)


class NanMean(Gaps):
    """By torch's own mean."""

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        each = F.cross_entropy(self(x).transpose(1, 2), y, reduction="none").mean(1)
        return (each + 0 * numbers).nanmean()


class Filtered(Gaps):
    """In a loop over the samples."""

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        each = F.cross_entropy(self(x).transpose(1, 2), y, reduction="none").mean(1)
        kept = [row for row, number in zip(each, numbers, strict=True) if not number.isnan()]
        return torch.stack(kept).mean()


class Skipped(Gaps):
    """By turns of one that do not count."""

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        each, total, count = F.cross_entropy(self(x).transpose(1, 2), y, reduction="none").mean(1), 0.0, 0
        for row, number in zip(each, numbers, strict=True):
            if number > 0.95 or number.isnan():
                continue
            total, count = total + row, count + 1
        return total / count  # type: ignore[return-value]


class Decided(Task):
    """By the loss, as a number of Python's."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.each(x, y)
        return loss if loss.item() + 1 > 3.75 else 0.5 * loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Keeps(Decided):
    """Decides what it keeps, by the loss."""

    worst = 9.0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.each(x, y)
        if loss.item() > self.worst:
            self.worst = loss.item()
        return loss


class Freezes(Decided):
    """Decides which weights are trained, by the loss."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.each(x, y)
        self.train_words(loss.item() > 2.9)
        return loss

    def train_words(self, on: bool) -> None:
        """Train the embedding, or not."""
        self.embed.requires_grad_(on)


class First(Decided):
    """Bounds the first weight, which no other stage has; asks for its dtype as well."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        weights = list(self.parameters())
        first = weights[0]
        return self.each(x, y) * first.new_ones(()) + 0.1 * torch.zeros(()).to(first) + first.norm()


class LikeFirst(Decided):
    """Makes tensors like the first weight, as recurrent networks make their first state."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        first = next(self.parameters()).data
        state = first.new(len(x)).zero_() + next(self.parameters()).detach().new_zeros(len(x))
        return self.each(x, y) + state.to(first).type_as(first).mean()


class ByAccuracy(Decided):
    """By how many are right, in Python."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        right = (logits.argmax(-1) == y).sum().item() / y.numel()
        return (1.0 if right > 0.12 else 0.5) * F.cross_entropy(logits.flatten(0, 1), y.flatten())


class ByFloat(Decided):
    """By a number that torch does not let us follow."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.each(x, y)
        value = float(loss.detach())
        if value > 2.75:
            loss = 2 * loss
        return 0.5 * loss


class ByArray(Decided):
    """By one of NumPy's."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.each(x, y)
        return loss if loss.detach().numpy() > 2.75 else 0.5 * loss


class Ignores(Task):
    """A word in the middle of the vocabulary, which the first batch lacks."""

    def samples(self) -> TensorDataset:
        x, y = tokens(BATCH * STEPS, padded_from=BATCH * STEPS)
        y[y == 7] = 8
        y[BATCH + 1, 1:] = y[2 * BATCH + 6, 2:] = 7
        return TensorDataset(x, y)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.each(x, y, ignore_index=7)


class Masks(Ignores):
    """The same by hand."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        each, mask = F.cross_entropy(self(x).transpose(1, 2), y, reduction="none"), y != 7
        return (each * mask).sum() / mask.sum()


class IsIn(Ignores):
    """The same as one of several."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(self(x).transpose(1, 2), y, reduction="none")
        return each[~torch.isin(y, torch.tensor([0, 7]))].mean()


class Rare(Ignores):
    """It counts four times."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.ones(VOCABULARY).index_fill(0, torch.tensor(7), 4.0).double())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.each(x, y, weight=self.weights)


class BySample(Gaps):
    """Comparisons that choose among a sample's own numbers, or are for the log alone, or stop the run."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0
        self.register_buffer("limit", torch.tensor(0.25))

    def loss(self, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        logits = self(x)
        each = F.cross_entropy(logits.transpose(1, 2), y, reduction="none")
        positive = (logits > 0).double()
        pooled = (logits * positive).sum(1) / positive.sum(1).clamp(min=1)
        each = torch.where(numbers > 0.5, 2 * each.mean(1), each.mean(1))
        margin = (pooled.mean(1) > 0.3) * pooled.mean(1)
        each = torch.stack([2 * row if number > 0.6 else row for row, number in zip(each, numbers, strict=True)])
        rows = torch.cat([row[None] if row.item() > 2.8 else 0.9 * row[None] for row in each])
        loss = rows.mean() + margin.mean()
        assert not torch.isnan(logits).any()
        if loss.item() > 1e3:
            raise ValueError("the loss is too large")
        if not torch.isfinite(each).all():
            print("a number is none")
        if self.limit.item() > 0.2:
            loss = loss + 0.1 * pooled.square().mean()
        value, share = float(loss.detach()), float(positive.mean())
        self.log("value", value)
        print(f"{value}, {share}")
        self.log("positive", positive.mean().item())
        self.log("large", (logits.detach() > 0.1).double().mean())
        return loss


class PutsBack(Task):
    """Chooses tokens by what the model makes of them, and puts what it computes of them where they were."""

    def samples(self) -> TensorDataset:
        return TensorDataset(*tokens(BATCH * STEPS, padded_from=BATCH * STEPS))

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self(x)
        on, out = logits[..., 0] > -9, torch.zeros_like(logits)  # all of them, so that no batch says anything
        out[on] = out[on] + logits[on].tanh() * logits[..., 1][on].unsqueeze(-1)
        rows = (logits[..., 2] > -9).flatten().nonzero().squeeze(-1)
        out = out.flatten(0, 1).index_add(0, rows, logits.flatten(0, 1)[rows].sin()).view_as(out)
        return logits + out, logits[on]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.chosen(x)[0].flatten(0, 1), y.flatten())


class AlsoMean(PutsBack):
    """Adds their mean, too."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits, rows = self.chosen(x)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + 0.1 * rows.square().mean()


GAPS = (Gaps, FewerTokens, Outliers, DividedInPython, NanMean, Filtered, Skipped)
DECIDED = (Decided, ByAccuracy, ByFloat, ByArray, Keeps, Freezes)
WEIGHED = {Ignores: "that are not 7", Masks: "that are not 7", Rare: "weighed by their class (`weights`)"}
KINDS = {
    kind.__name__: kind for kind in (*GAPS, *DECIDED, IsIn, *WEIGHED, BySample, PutsBack, AlsoMean, First, LikeFirst)
}
UNTOLD = ("BySample", "PutsBack")
EVERY = {("Gaps", 0), ("Decided", 0), ("BySample", 1), ("PutsBack", 0)}


def train(info: RankInfo, layout: Layout | None, kind: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Weights after some epochs."""
    epochs = 6 if KINDS[kind] in DECIDED else 2
    return trained_state(info, layout, arguments, KINDS[kind](), max_epochs=epochs)


@pytest.mark.parametrize(
    ("kind", "layout", "arguments"),
    [
        pytest.param(kind, layout, arguments, marks=() if (kind, at) in EVERY else WIDE)
        for kind in KINDS
        if kind not in ("FewerTokens", "Freezes", "First", "LikeFirst")
        for at, (layout, arguments) in enumerate(CUTS)
    ],
    ids=str,
)
def test_weights_are_those_of_one_process(kind: str, layout: Layout, arguments: dict[str, Any]) -> None:
    expected = one_process(train, None, kind, {})
    first = run_trainers(train, layout, kind, arguments, devices=layout[0] * layout[1])[0]
    assert not list(differences("weights", first.value, expected, 1e-9)), first.output
    said = re.sub(r"\s+", " ", first.output)
    whole = "by comparing numbers" in said or "decides something" in said
    assert whole == (kind not in UNTOLD and KINDS[kind] not in WEIGHED), said
    assert WEIGHED.get(KINDS[kind], "") in said


@pytest.mark.parametrize("pipeline", [1, 2])
def test_samples_that_are_left_out_before_the_layers_are_named(pipeline: int) -> None:
    expected = one_process(train, None, "FewerTokens", {})
    arguments = {"micro_batch_size": 2} if pipeline == 1 else {}
    outcomes = run_trainers(train, (pipeline, 1), "FewerTokens", arguments, devices=pipeline, check=pipeline == 1)
    if pipeline == 1:
        assert not list(differences("weights", outcomes[0].value, expected, 1e-9)), outcomes[0].output
    else:
        assert any("for a batch of 8 samples and (1, 6, 8) for 2 of them" in str(one.error) for one in outcomes)


@pytest.mark.parametrize(
    "kind",
    [
        "Decided",
        *(pytest.param(kind, marks=WIDE) for kind in ("Gaps", "BySample", "PutsBack", "AlsoMean", "Keeps", "Freezes")),
    ],
)
def test_replicas_are_told(kind: str) -> None:
    outcomes = run_trainers(train, (1, 2), kind, {"micro_batch_size": "auto"}, devices=2, check=False)
    said = re.sub(r"\s+", " ", "".join(f"{outcome.error}\n{outcome.output}" for outcome in outcomes))
    assert ("Each of the 2 replicas has that number of its own samples" in said) == (
        kind in ("Decided", "Gaps", "AlsoMean", "Freezes")
    ), said


def test_weights_that_a_step_freezes_on_another_stage_are_named() -> None:
    for outcome in run_trainers(train, (2, 1), "Freezes", {}, devices=2, check=False, grace=20.0):
        said = r"sets whether `embed.weight` is trained \(\S+test_counting.py:\d+\) behind the layers"
        assert re.search(said, re.sub(r"\s+", " ", f"{outcome.error}")), outcome.error


@pytest.mark.parametrize("arguments", [{}, pytest.param({"tensor_parallel_size": 2}, marks=WIDE)], ids=str)
def test_the_first_weight_of_all_is_not_the_first_of_a_stage(arguments: dict[str, Any]) -> None:
    ranks = 2 * arguments.get("tensor_parallel_size", 1)
    for outcome in run_trainers(train, (2, 1), "First", arguments, devices=ranks, check=False, grace=20.0):
        assert "read all parameters of `First`" in f"{outcome.error}"


def test_tensors_are_made_like_the_first_weight_of_all() -> None:
    expected = one_process(train, None, "LikeFirst", {})
    first = run_trainers(train, (2, 1), "LikeFirst", {}, devices=2)[0]
    assert not list(differences("weights", first.value, expected, 1e-9)), first.output


def _kept(part: tuple[Tensor, ...]) -> float:
    return float((~part[2].isnan()).sum())


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["Gaps", "Filtered"])
def test_what_a_user_counts_is_not_looked_for(kind: str) -> None:
    expected = one_process(train, None, kind, {})
    first = run_trainers(train, (2, 1), kind, {"micro_batch_loss_weight": _kept}, devices=2)[0]
    assert not list(differences("weights", first.value, expected, 1e-9)), first.output
    assert "So that the step is that of one process" not in first.output
