"""When spread weights are freed, as a run chooses it by itself."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

from lightning_megatron import MegatronStrategy
from lightning_megatron.data_parallel.windows import freeing
from tests.data_parallel.sharing_scenarios import Setup, SharedTask
from tests.harness import RankInfo
from tests.parity.train import make_trainer


def chosen(info: RankInfo, setup: Setup, rooms: list[float]) -> dict[str, Any]:
    """What a rank has chosen, said and reported, and how often its layers opened in each step.

    Args:
        info: of the rank.
        setup: of the run.
        rooms: by rank, the free memory that it measures, in bytes of its whole weights.
    """

    def room(windows: Any) -> int:
        whole = sum(p.numel() * p.element_size() for window in windows for p in window.parameters)
        return int(rooms[info.rank] * whole)

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    strategy = MegatronStrategy(*setup.layout, **setup.strategy)  # type: ignore[misc]
    trainer = make_trainer(info, strategy, max_epochs=2, limit_val_batches=0, **setup.trainer)
    opened: list[int] = []
    ends = freeing.Freeing.end

    def ending(self: freeing.Freeing, *, updates: bool) -> None:
        ends(self, updates=updates)
        opened.append(sum(window.opened for window in self._windows))

    try:
        with mock.patch.object(freeing, "_free_now", room), mock.patch.object(freeing.Freeing, "end", ending):
            trainer.fit(SharedTask())
    finally:
        logger.removeHandler(handler)
    windows = strategy.run.engine.model_gradients.windows
    assert windows is not None
    return {
        "chosen": windows.freeing.chosen,
        "keeps": windows.freeing.keeps,
        "opened": [after - before for before, after in zip([0, *opened], opened, strict=False)],
        "windows": len(windows.windows),
        "said": [line for line in said if "weight_sharding" in line and "stay spread" not in line],
        "report": str(strategy.memory_report()),
    }
