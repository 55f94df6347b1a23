"""Steps that read, from the Trainer's metrics, what they have logged themselves.

The value of a batch is put together once the step has run on all of its micro-batches and replicas. In one process it
is there at once, and after a step everywhere::

    self.log("loss", loss)
    self.trainer.callback_metrics["loss"]          in the same step: refused
    self.trainer.callback_metrics["val_loss"]      what other steps have logged
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl

from lightning_megatron.mesh.torch_functions import line_of_user
from lightning_megatron.pipeline.elsewhere.reachable import functions_of_step, names_in
from lightning_megatron.strategy.lightning.trainer_access import METRICS, metrics_shown_as

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class LoggedReads:
    """Refuses them.

    Args:
        module: the user's.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._asks: bool | None = None

    @contextmanager
    def refused(self, logged: Callable[[], Collection[str]]) -> Iterator[None]:
        """Around a step whose logs are recorded.

        Args:
            logged: names of what it has logged so far.
        """
        trainer = getattr(self._module, "_trainer", None)
        if trainer is None or not self._reads():
            yield
            return
        with metrics_shown_as(trainer, lambda table: _InStep(table).by(logged)):
            yield

    def _reads(self) -> bool:
        """Whether the code of a step asks for metrics."""
        if self._asks is None:
            called = functions_of_step(self._module, *_STEPS)
            self._asks = any(name in names_in(each.__code__)[0] for each in called for name in METRICS)
        return self._asks


class _InStep(dict[str, Any]):
    """The Trainer's metrics while a step runs."""

    _logged: Callable[[], Collection[str]] = tuple

    def by(self, logged: Callable[[], Collection[str]]) -> _InStep:
        """Ask what has been logged."""
        self._logged = logged
        return self

    def _check(self, key: Any = None) -> None:
        for name in self._logged():
            if key is None or key in (name, f"{name}_step", f"{name}_epoch"):
                raise RuntimeError(
                    f"the step reads `{name}` from the Trainer's metrics ({line_of_user()}) and has logged it itself: "
                    "the value of a batch is put together when its micro-batches and replicas have ended the step. "
                    "Use the number that is logged, or read the metrics in `on_train_batch_end`."
                )

    def __getitem__(self, key: str) -> Any:
        self._check(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._check(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._check(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self._check()
        return super().__iter__()

    def keys(self) -> Any:
        self._check()
        return super().keys()

    def items(self) -> Any:
        self._check()
        return super().items()

    def values(self) -> Any:
        self._check()
        return super().values()
