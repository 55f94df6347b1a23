"""Metrics that take what they are given for logits, as soon as one number of it is no probability.

torchmetrics asks that of each update by itself. One process updates with a batch, and micro-batches and replicas with a
part of it each, some of which may look like probabilities::

    batch     [-1.2  0.4  0.3  0.9]             logits: sigmoid
    parts     [-1.2  0.4]   [0.3  0.9]          logits, and probabilities

What the parts of each batch looked like is kept until the metric is computed, and told then; so no step waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric, classification

from lightning_megatron.mesh.messages import objects

_BOTH = 3
_KINDS = (
    *(classification.BinaryStatScores, classification.MultilabelStatScores, classification.BinaryConfusionMatrix),
    *(classification.MultilabelConfusionMatrix, classification.BinaryCalibrationError, classification.BinaryHingeLoss),
    *(classification.MulticlassCalibrationError, classification.MulticlassHingeLoss),
    *(classification.BinaryPrecisionRecallCurve, classification.MulticlassPrecisionRecallCurve),
    classification.MultilabelPrecisionRecallCurve,
)


def takes_logits(metric: Metric) -> bool:
    """Whether a metric asks of what it is given whether these are logits."""
    return isinstance(metric, _KINDS)


class LogitsNoted:
    """Installed as ``update`` on such a metric.

    Args:
        step: what is the same object for all updates of one batch; ``None`` where a batch is one.
        update: the metric's own.
        name: of the metric, for the message.
    """

    def __init__(self, step: Callable[[], object], update: Callable[..., Any], name: str) -> None:
        self._step, self._update, self._name = step, update, name
        self._latest: object = None
        self._looked: list[Tensor] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given, step = kwargs.get("preds", args[0] if args else None), self._step()
        if step is not None and isinstance(given, Tensor) and given.is_floating_point() and given.numel():
            with torch.no_grad():
                logits = ((given < 0) | (given > 1)).any()
                looks = torch.where(logits, 1, 2)
            if step is self._latest:
                self._looked[-1] |= looks
            else:
                self._latest = step
                self._looked.append(looks)
        return self._update(*args, **kwargs)

    def tell(self, replicas: Any) -> None:
        """Say that parts of a batch looked otherwise; collective over the replicas, unless there are none.

        Args:
            replicas: their group, or ``None``.
        """
        here = torch.stack(self._looked).tolist() if self._looked else []
        self._looked, self._latest = [], None
        told = [here] if replicas is None else objects.gather(here, replicas)
        both = (one | other for each in told for one, other in zip(each, told[0], strict=False))
        if any(looks == _BOTH for looks in both):
            rank_zero_warn(
                f"the metric `{self._name}` takes what it is given for logits where a number is below 0 or above 1, "
                "and for probabilities otherwise. Of the micro-batches or replicas of a batch some looked like logits "
                "and some did not, so its value may not be that of one process. Give it probabilities "
                "(`logits.sigmoid()`)."
            )
