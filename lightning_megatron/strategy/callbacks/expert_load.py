"""Shows how evenly the experts of mixtures are used, which one rank cannot tell: it sees its own tokens only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_megatron.experts.balance.load import ExpertCounts, load_svg
from lightning_megatron.mesh.messages import objects

LOAD = "ExpertLoad (`log_expert_load=True`)"
_ALONE = {"sequence_parallel": False, "compile_layers": False}


class ExpertLoad(Callback):
    """Counts the rows that each expert gets in each training step, over all ranks, logs and draws them.

    Logs ``expert_load``, the rows of the busiest expert over the mean, in the layer where that is largest;
    ``expert_load/<name>`` of each layer; and ``expert_load_ranks``, the same for the ranks that share out experts, of
    which all wait for the busiest one. ``MegatronStrategy(log_expert_load=True)`` adds this callback without a picture.

    Args:
        directory: where global rank 0 writes ``expert-load.svg`` at the end of a fit, one field per layer with the load
            of each expert over the steps; ``None`` for no picture. Needs matplotlib (extra ``plots``).
        every: how many steps from one count to the next; ranks meet once for each.

    Attributes:
        steps: numbers of the steps that were counted.
        load: by name of the experts, the rows of each expert in each of these steps; equal on all ranks.

    Raises:
        ValueError: ``every`` is below 1.
    """

    def __init__(self, directory: str | Path | None = None, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"`every={every}` must be at least 1.")
        self._directory, self._every = directory, every
        self._counts: ExpertCounts | None = None
        self._wanted = False
        self.steps: list[int] = []
        self.load: dict[str, list[list[int]]] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse another strategy, and options under which a rank does not see whole rows.

        Raises:
            MisconfigurationException: with the option.
        """
        check_counts(trainer, LOAD)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Follow the experts of the divided module.

        Raises:
            MisconfigurationException: there are none.
        """
        strategy: Any = trainer.strategy
        streams = strategy.run.assembled.streams
        self._counts = ExpertCounts(
            strategy.run.module,
            lambda: self._wanted and trainer.training and not streams.tries,
            counts_whole=strategy.mesh.coordinates.context == 0,
        )
        if not any(objects.gather(bool(self._counts.take()), strategy.mesh.group("world"))):
            raise MisconfigurationException(
                "ExpertLoad (`log_expert_load=True`) found no mixture of experts in this module; leave it out."
            )

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin to count, if this step is one to be counted."""
        self._wanted = batch_idx % self._every == 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the counts of all ranks up, and log them; collective over the world."""
        if not self._wanted or self._counts is None:
            return
        self._wanted = False
        strategy: Any = trainer.strategy
        ranks, load = strategy.options.expert_parallel_size, load_of_all(self._counts, strategy)
        self.steps.append(trainer.global_step)
        for name, rows in load.items():
            self.load.setdefault(name, []).append(rows)
            pl_module.log(f"expert_load/{name}", _imbalance(rows))
        pl_module.log("expert_load", max(map(_imbalance, load.values())))
        if ranks > 1:
            pl_module.log("expert_load_ranks", max(_imbalance(_of_ranks(rows, ranks)) for rows in load.values()))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Plot the counts."""
        if self._counts is not None:
            self._counts.close()
            self._counts = None
        if self._directory is not None and trainer.is_global_zero and self.steps:
            Path(self._directory).mkdir(parents=True, exist_ok=True)
            (Path(self._directory) / "expert-load.svg").write_text(load_svg(self.steps, self.load))

    def state_dict(self) -> dict[str, Any]:
        """The counts so far, for a run that goes on from a checkpoint."""
        return {"steps": self.steps, "load": self.load}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from the counts of a checkpoint."""
        self.steps, self.load = list(state_dict["steps"]), dict(state_dict["load"])


def check_counts(trainer: pl.Trainer, given: str) -> None:
    """Refuse a strategy, and options, under which the rows of experts are not counted.

    Args:
        trainer: of the run.
        given: what counts them.

    Raises:
        MisconfigurationException: with the option.
    """
    options = getattr(trainer.strategy, "options", None)
    if options is None:
        raise MisconfigurationException(
            f"{given} needs `Trainer(strategy=MegatronStrategy(...))`; this Trainer has "
            f"{type(trainer.strategy).__name__}."
        )
    for name, only in _ALONE.items():
        if getattr(options, name) != only:
            raise MisconfigurationException(
                f"{given} does not count under `{name}={getattr(options, name)!r}`; use `{name}={only!r}`, or leave it "
                "out."
            )


def load_of_all(counts: ExpertCounts, strategy: Any) -> dict[str, list[int]]:
    """Rows of each expert since the last call, of all ranks, by name of the experts, in order; collective over the
    world.

    Args:
        counts: of this rank.
        strategy: of the run.
    """
    mesh = getattr(strategy, "mesh", None)
    own = counts.take()
    everyone = (
        [own] if mesh is None else objects.gather(own if mesh.coordinates.tensor == 0 else {}, mesh.group("world"))
    )
    load: dict[str, list[int]] = {}
    for told in everyone:
        for name, rows in told.items():
            load[name] = [a + b for a, b in zip(load.get(name, [0] * len(rows)), rows, strict=True)]
    return dict(sorted(load.items(), key=lambda item: [p.zfill(9) for p in item[0].split(".")]))


def _imbalance(rows: list[int]) -> float:
    return max(rows) * len(rows) / (sum(rows) or 1)


def _of_ranks(rows: list[int], ranks: int) -> list[int]:
    """Rows of the ranks that hold these experts in blocks: [1, 2, 3, 4] over 2 ranks gives [3, 7]."""
    local = len(rows) // ranks
    return [sum(rows[first : first + local]) for first in range(0, len(rows), local)]
