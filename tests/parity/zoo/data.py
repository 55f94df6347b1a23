"""Seeded data that every layout cuts into the same global batches.

Replica r of d reads the r-th of d equal parts of each global batch, so that the mean over replicas is the mean over
the batch. Lightning's injected sampler cannot be used for that: it shuffles, and it deals samples round robin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

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


class GlobalBatches(Sampler[list[int]]):
    """Consecutive batches of ``size`` samples, of which this replica gets its part.

    ``GlobalBatches(10, 4, replica=1, replicas=2)`` yields ``[2, 3], [6, 7], [9]``.
    """

    def __init__(self, count: int, size: int, replica: int = 0, replicas: int = 1) -> None:
        self.count, self.size, self.replica, self.replicas = count, size, replica, replicas

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, self.count, self.size):
            batch = list(range(start, min(start + self.size, self.count)))
            part = len(batch) // self.replicas
            assert part * self.replicas == len(batch), f"a batch of {len(batch)} has no {self.replicas} equal parts"
            yield batch[self.replica * part : (self.replica + 1) * part]

    def __len__(self) -> int:
        return -(-self.count // self.size)


def loader(
    module: LightningModule, items: Dataset[Any], collate: Callable[[list[Any]], Any] | None = None, size: int = BATCH
) -> DataLoader[Any]:
    """The loader of this data-parallel replica, as the Trainer's strategy numbers replicas."""
    parts = module.trainer.distributed_sampler_kwargs or {}
    sampler = GlobalBatches(len(items), size, parts.get("rank", 0), parts.get("num_replicas", 1))  # type: ignore[arg-type]
    return DataLoader(items, batch_sampler=sampler, collate_fn=collate)
