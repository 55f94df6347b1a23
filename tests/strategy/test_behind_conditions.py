"""What steps keep for hooks behind a condition on their batch is, over replicas, what one process keeps."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.strategy.carried.step_stores import stored_behind_content
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.scenario import Layout, differences, trainer_for
from tests.strategy.loss_modules import Task

WIDE = pytest.mark.wide


class KeepsSome(Task):
    """Keeps the samples whose loss is large; a batch, a part of it or a replica may have none."""

    above = 2.97
    decides = "any"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []
        self.pairs: list[Any] = []
        self.means: list[Any] = []
        self.every: list[Any] = []
        self.hits, self.total = 0, 0.0
        self.by_word: dict[int, list[Tensor]] = {}
        self.early = 0.0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> Tensor:
        x, y = batch
        each = self.each(x, y, reduction="none").view(x.shape).mean(1)
        loss, each = each.mean(), each.detach()
        large = each > self.above
        if large.any() if self.decides == "any" else each.mean() > self.above:
            self.rows.append(each[large])
            self.pairs.append({"x": x[large], "loss": (each[large], y[large])})
            self.means.append(each.mean())
            self.hits += 1
            self.total += float(each[large].sum())
        for word in (x[:, 0] % 3).unique().tolist():
            self.by_word.setdefault(word, []).append(each[x[:, 0] % 3 == word])
        self.every.append(each[large])
        if not large.any():
            return loss
        self.early += float(each[large].max())
        return loss

    def on_train_epoch_end(self) -> None:
        found = [float(len(self.rows)), self.total, float(self.hits), float(len(self.every)), self.early]
        found += [float(torch.cat(each).std()) for _, each in sorted(self.by_word.items())]
        found += [float(torch.cat(rows).square().sum()) for rows in (self.rows, self.every) if rows]
        found += [float(torch.stack(self.means).square().sum())] if self.means else []
        for pair in self.pairs:
            found += [float(pair["x"].sum()), float(pair["loss"][0].sum()), float(pair["loss"][1].sum())]
        self.log_dict({f"kept_{place}": value for place, value in enumerate(found)})
        for kept in (self.rows, self.pairs, self.means, self.every, self.by_word):
            kept.clear()  # type: ignore[attr-defined]
        self.hits, self.total, self.early = 0, 0.0, 0.0


class KeepsFew(KeepsSome):
    """Of most batches none."""

    above = 3.1


class KeepsByMean(KeepsSome):
    """The batch decides as a whole, not its samples."""

    above, decides = 2.9, "mean"


class InValidation(Task):
    """Keeps samples of validation; in one batch, those of one replica have none."""

    above = 2.0
    decides = "any"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Tensor] = []
        self.by_word: dict[int, list[Tensor]] = {}
        self.total = 0.0

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> None:
        x, y = batch
        each = self.each(x, y, reduction="none").view(x.shape).mean(1)
        large = each > self.above
        if large.any() if self.decides == "any" else each.mean() > 1.7:
            self.rows.append(each[large])
            self.total += float(each[large].sum())
        for word in (x[:, 0] % 3).unique().tolist():
            self.by_word.setdefault(word, []).append(each[x[:, 0] % 3 == word])

    def on_validation_epoch_end(self) -> None:
        found = [self.total, *(float(torch.cat(each).std()) for _, each in sorted(self.by_word.items()))]
        found += [float(torch.cat(self.rows).square().sum())] if self.rows else []
        self.log_dict({f"kept_{place}": value for place, value in enumerate(found)})
        self.rows.clear()
        self.by_word.clear()
        self.total = 0.0


class InValidationByMean(InValidation):
    """The batch decides as a whole: half of it may decide otherwise."""

    above, decides = 1.7, "mean"


IN_VALIDATION: dict[str, type[InValidation]] = {kind.__name__: kind for kind in (InValidation, InValidationByMean)}
SOME: dict[str, type[KeepsSome]] = {kind.__name__: kind for kind in (KeepsSome, KeepsFew, KeepsByMean)}


def kept_behind(info: RankInfo, layout: Layout | None, name: str, accumulated: int) -> dict[str, float]:
    """What three epochs have logged."""
    arguments = {} if layout is None else {"micro_batch_size": 2 if layout[0] > 1 else "auto"}
    options = {"accumulate_grad_batches": accumulated, "num_sanity_val_steps": 0, "limit_val_batches": None}
    trainer = trainer_for(info, layout, arguments, max_epochs=3, **options)
    trainer.fit({**SOME, **IN_VALIDATION}[name]())
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("accumulated", [1, pytest.param(2, marks=WIDE)])
@pytest.mark.parametrize(
    "layout",
    [(1, 2), pytest.param((2, 1), marks=WIDE), pytest.param((2, 2), marks=WIDE), pytest.param((1, 4), marks=WIDE)],
    ids=str,
)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "KeepsSome" else WIDE) for name in SOME])
def test_hooks_find_what_one_process_keeps_behind_a_condition(name: str, layout: Layout, accumulated: int) -> None:
    expected = one_process(kept_behind, None, name, accumulated)
    for found in run_trainers(kept_behind, layout, name, accumulated, devices=layout[0] * layout[1]):
        assert found.value.keys() == expected.keys()
        assert not list(differences("kept", found.value, expected, 1e-9)), found.output


@pytest.mark.parametrize("layout", [(1, 2), pytest.param((2, 2), marks=WIDE)], ids=str)
def test_hooks_find_what_one_process_keeps_in_validation_or_the_user_is_told(layout: Layout) -> None:
    ranks = layout[0] * layout[1]
    expected = one_process(kept_behind, None, "InValidation", 1)
    for found in run_trainers(kept_behind, layout, "InValidation", 1, devices=ranks):
        assert not list(differences("kept", found.value, expected, 1e-9)), found.output
    first, *_ = run_trainers(kept_behind, layout, "InValidationByMean", 1, devices=ranks, check=False, grace=20.0)
    said = f"{first.error}{first.output}"
    assert re.search("`validation_step` writes `[^.]*`rows`.* behind a condition on its batch, which the samples", said)


def test_what_is_stored_behind_a_condition_on_the_batch_is_read() -> None:
    behind = {"rows", "pairs", "means", "hits", "total", "by_word", "early"}
    assert stored_behind_content([KeepsSome.training_step]) == behind
    assert stored_behind_content([KeepsSome.training_step], loops=False) == behind - {"by_word"}

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2 or (self.training and len(self.rows) > 3 and batch is not None):
            self.rows.append(batch)

    assert stored_behind_content([training_step]) == set()
