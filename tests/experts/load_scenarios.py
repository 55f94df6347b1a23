"""Mixtures whose experts' load is counted."""

from __future__ import annotations

from typing import Any

from lightning_megatron import MegatronStrategy
from lightning_megatron.callbacks import ExpertLoad
from tests.experts.expert_scenarios import Data, built
from tests.harness import RankInfo
from tests.parity.train import make_trainer


def loads(
    info: RankInfo, name: str, options: dict[str, Any], trainer: dict[str, Any], directory: str | None = None
) -> dict[str, Any]:
    """The load of each expert over three steps, and what was logged of it.

    Args:
        info: of the job.
        name: of the module.
        options: of the strategy.
        trainer: further arguments of the Trainer.
        directory: where to draw it.
    """
    counted = ExpertLoad(directory)
    callbacks = [] if options.get("log_expert_load") else [counted]
    runner = make_trainer(info, MegatronStrategy(**options), max_steps=3, callbacks=callbacks, **trainer)
    runner.fit(built(name), datamodule=Data(name))
    counted = next(each for each in runner.callbacks if isinstance(each, ExpertLoad))
    logged = {key: float(value) for key, value in runner.callback_metrics.items() if key.startswith("expert_load")}
    return {"load": counted.load, "steps": counted.steps, "logged": logged}
