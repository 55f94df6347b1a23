"""Seeded data that every layout cuts into the same global batches.

Replica r of d reads the r-th of d equal parts of each global batch, so that the mean over replicas is the mean over
the batch. Lightning's injected sampler cannot be used for that: it shuffles, and it deals samples round robin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

VOCABULARY = 29
LENGTH = 8
BATCH = 8
TRAIN = 2 * BATCH + 4  # three batches an epoch, the last one smaller
VALIDATION = BATCH + 4


class Items(Dataset[dict[str, Tensor]]):
    """``count`` random samples: tokens [LENGTH], targets [LENGTH], a key mask, features [LENGTH, 6] and an image.

    Args:
        count: number of samples.
        seed: of the generator; the same seed gives the same samples everywhere.
    """

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(1234 + seed)
        tokens = torch.randint(0, VOCABULARY, (count, LENGTH + 1), generator=generator)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (count, 1), generator=generator)
        masked = torch.rand(count, LENGTH - 1, generator=generator).argsort(dim=1)[:, :2] + 1
        self.tokens, self.targets = tokens[:, :-1], (3 * tokens[:, 1:] + 1) % VOCABULARY
        self.mask = torch.arange(LENGTH)[None] < lengths
        self.labels = self.tokens.scatter(1, masked, -100)  # two ignored per row: token means stay exact
        self.features = torch.randn(count, LENGTH, 6, generator=generator)
        self.images = torch.randn(count, 3, 8, 8, generator=generator)
        self.classes = torch.randint(0, 5, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        names = ("tokens", "targets", "mask", "labels", "features", "images", "classes")
        return {name: getattr(self, name)[index] for name in names}


def replica_indices(count: int, size: int, replica: int, replicas: int) -> list[int]:
    """The samples of one replica: its part of each global batch of ``size`` samples.

    ``replica_indices(10, 4, replica=1, replicas=2)`` is ``[2, 3] + [6, 7] + [9]``.
    """
    indices: list[int] = []
    for start in range(0, count, size):
        batch = range(start, min(start + size, count))
        part = len(batch) // replicas
        assert part * replicas == len(batch), f"a batch of {len(batch)} has no {replicas} equal parts"
        indices += batch[replica * part : (replica + 1) * part]
    return indices


def loader(
    module: LightningModule, items: Dataset[Any], collate: Callable[[list[Any]], Any] | None = None, size: int = BATCH
) -> DataLoader[Any]:
    """The loader of this data-parallel replica, as the Trainer's strategy numbers replicas."""
    parts = module.trainer.distributed_sampler_kwargs or {}
    replica, replicas = parts.get("rank", 0), parts.get("num_replicas", 1)
    own = Subset(items, replica_indices(len(items), size, replica, replicas))  # type: ignore[arg-type]
    return DataLoader(own, batch_size=size // replicas, collate_fn=collate)
