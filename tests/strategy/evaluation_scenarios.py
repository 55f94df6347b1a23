"""Steps of evaluation whose numbers are no means over samples; what strangers bring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trainer_for
from tests.strategy.loss_modules import BATCH, VOCABULARY, Task, tokens

KINDS = (
    *("sum", "count", "mean", "padded", "padded later", "root", "largest", "constant", "late", "batch size", "summed"),
    *("appended sums", "appended means", "extended", "rows", "counter", "running mean", "mapping", "nested", "integer"),
    *("per sample", "none", "by class", "perplexity"),
)


class Evaluated(Task):
    """Evaluates batches of 8, 8, 8 and 2 samples.

    Args:
        kind: what the step logs, returns or keeps.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.kept, self.calls, self.right, self.mean = kind, [], 0, 0, 0.0
        self.seen: list[Any] = []

    def val_dataloader(self) -> DataLoader[Any]:
        """Of tokens and targets, some of them padded."""
        padded = 8 if self.kind == "padded later" else 0 if self.kind == "padded" else 26
        return DataLoader(TensorDataset(*tokens(26, padded_from=padded)), batch_size=BATCH)

    predict_dataloader = val_dataloader

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        """Logs, returns or keeps something."""
        x, y = batch
        logits = self(x)
        each = functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
        best = logits.argmax(-1)
        number = self._number(each, y, best, batch_idx)
        if number is not None and not self.trainer.predicting:
            size = {"batch_size": len(x)} if self.kind == "batch size" else {}
            fx = {"reduce_fx": "sum"} if self.kind == "summed" else {}
            self.log("number", number, **size, **fx)
            self.log("mean", each.mean())
        return {
            "mapping": {
                "right": (best == y).sum(),
                "loss": each.mean(),
                "best": best,
                "texts": [str(int(row[0])) for row in x],
            },
            "nested": [each.sum(), best, (each.mean(), "text")],
            "integer": int((best == y).sum()),
            "per sample": list(each.mean(1)),
            "by class": torch.bincount(best.flatten(), minlength=VOCABULARY),
            "perplexity": {"perplexity": each.mean().exp()},
        }.get(self.kind)

    def _number(self, each: Tensor, y: Tensor, best: Tensor, batch_idx: int) -> Any:
        if self.kind in ("appended sums", "appended means"):
            self.kept.append(each.sum() if self.kind == "appended sums" else each.mean())
        if self.kind == "extended":
            self.kept.extend(list(each.mean(1)))
        for row in each.mean(1) if self.kind == "rows" else ():
            self.kept.append(row)
        if self.kind == "counter":
            self.calls += 1
            self.right += int((best == y).sum())
        if self.kind == "running mean":
            self.mean = 0.9 * self.mean + 0.1 * float(each.mean())
        return {
            "sum": each.sum(),
            "count": (best == y).sum().double(),
            "padded": each.sum() / (y != -100).sum(),
            "padded later": each.sum() / (y != -100).sum(),
            "root": each.mean().sqrt(),
            "largest": each.max(),
            "constant": 0.25,
            "late": each.sum() if batch_idx == 2 else None,
            "batch size": each.mean(),
            "summed": each.sum(),
            "counter": float(self.calls),
            "running mean": self.mean,
        }.get(self.kind)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        """Returns the same, or its tokens."""
        given = self.validation_step(batch, batch_idx)
        return batch[0] if given is None else given

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Keeps what hooks are given."""
        self.seen.append(outputs)

    def on_validation_epoch_end(self) -> None:
        """Logs and clears what was kept."""
        if self.kept:
            self.log("kept", torch.stack(self.kept).sum())
        self.seen.append((len(self.kept), self.calls, self.right, self.mean))
        self.kept.clear()


def evaluate(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Validates twice and predicts: what is logged, what hooks are given, what is returned."""
    torch.manual_seed(7)
    trainer, module = trainer_for(info, layout, arguments), Evaluated(kind)
    logged = [trainer.validate(module, verbose=False) for _ in range(2)]
    schedules = trainer.strategy._run.engine.schedules if layout else ()  # type: ignore[attr-defined]
    cuts = {count for count, only in schedules if only}
    return {"logged": logged, "seen": module.seen, "given": trainer.predict(module), "cuts": cuts}


class Baseline(Task):
    """Validates guesses that need no layer, and in the second batch the model as well.

    Args:
        model: whether it does.
    """

    def __init__(self, model: bool) -> None:
        super().__init__()
        self.model = model

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*tokens(20, padded_from=20)), batch_size=BATCH)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        counts = torch.bincount(batch[1].flatten(), minlength=VOCABULARY)
        self.log("guessed", (counts.max() / counts.sum()).double())
        if self.model and batch_idx == 1:
            self.log("loss", self.loss(*batch))


def baseline(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> Any:
    """Trains and validates; losses, and what was logged."""
    found: list[Any] = []
    for model in (False, True):
        torch.manual_seed(7)
        trainer, module = trainer_for(info, layout, arguments, max_epochs=2, num_sanity_val_steps=1), Baseline(model)
        trainer.fit(module)
        found.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        found.append(trainer.validate(module, verbose=False))
    return found
