"""Tells when two samples share a number that no two have shared before: the same person, text or group.

A loss may be made of such pairs alone (sums by person, one sample of each, how many persons there are), however the
step finds them. While all persons are different ones it looks like a mean over samples, and no trial tells::

    step 1    persons 0 1 | 2 3       a mean over samples
    step 5    persons 4 5 | 5 6       5 meets 5: tried with both at once, before the step runs

Two in one micro-batch, or in the uncut batch of one replica, are seen together whatever the loss is, and tell nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from lightning_megatron.mesh.messages import objects
from lightning_megatron.strategy.loss.counted import integers_of


class Meetings:
    """Follows the tensors of a batch that have an integer for each sample.

    Args:
        group: the replicas, whose samples are one batch; ``None`` for one.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._apart: frozenset[int] | None = None  # places of tensors whose numbers no two parts have shared

    def grow(self, parts: Sequence[Any]) -> frozenset[int]:
        """Tensors in which two parts share a number, where none have before. Collective over the replicas, while there
        are such tensors.

        Args:
            parts: micro-batches of this replica; its batch, where that runs uncut.

        Returns:
            Their places in a part; none in the first batch.
        """
        apart = self._apart
        if (apart is not None and not apart) or (self._group is None and len(parts) == 1):
            return frozenset()
        columns = ((place, tensor) for part in parts for place, tensor in integers_of(part) if tensor.ndim == 1)
        mine = [(place, set(tensor.tolist())) for place, tensor in columns if apart is None or place in apart]
        told = mine if self._group is None else [each for one in objects.gather(mine, self._group) for each in one]
        known = frozenset(place for place, _ in told) if apart is None else apart
        times = Counter((place, number) for place, numbers in told for number in numbers)
        met = frozenset(place for (place, _), many in times.items() if many > 1)
        self._apart = known - met
        return frozenset() if apart is None else met
