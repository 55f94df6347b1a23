"""Loaders that are hard to resume: workers that draw random numbers, generators of their own, streams that shuffle."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

SAMPLES, BATCH = 20, 4


def noise() -> float:
    """Drawn from all three global generators."""
    return random.random() + float(numpy.random.rand()) + torch.rand(()).item()


class Numbered(Dataset[Tensor]):
    """Sample ``i`` is ``[i, noise]``; with ``noisy`` the noise is drawn from all three generators at loading."""

    def __init__(self, noisy: bool, samples: int = SAMPLES) -> None:
        self.noisy = noisy
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, noise() if self.noisy else 0.0], dtype=torch.float64)


class OwnGenerators(Numbered):
    """Draws from generators that it keeps; torch's cannot be sent to a worker that is not forked."""

    def __init__(self, with_torch: bool = True) -> None:
        super().__init__(True)
        self.sources: dict[str, Any] = {"numpy": numpy.random.default_rng(3), "old": numpy.random.RandomState(4)}
        self.inner = [random.Random(5)]
        self.torch = torch.Generator().manual_seed(6) if with_torch else None

    def __getitem__(self, index: int) -> Tensor:
        drawn = self.sources["numpy"].random() + self.sources["old"].rand() + self.inner[0].random()
        value = drawn + (torch.rand((), generator=self.torch).item() if self.torch is not None else 0.0)
        return torch.tensor([index, value], dtype=torch.float64)


class Stream(IterableDataset[Tensor]):
    """The same samples, in order, as a stream; each worker has its share of them."""

    def __init__(self, order: str = "plain", noisy: bool = False) -> None:
        self.order = order
        self.noisy = noisy

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        mine = torch.arange(SAMPLES)[info.id :: info.num_workers] if info else torch.arange(SAMPLES)
        if self.order == "shuffled":
            mine = mine[torch.randperm(len(mine))]
        return self._samples(mine.tolist())

    def _samples(self, order: list[int]) -> Iterator[Tensor]:
        for index in order:
            yield torch.tensor([index, noise() if self.noisy else 0.0], dtype=torch.float64)


class Uncounted:
    """A batch sampler without a length: Lightning then fetches one batch ahead."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from torch.randperm(SAMPLES).view(-1, BATCH).tolist()


def _seed_by_hand(worker: int) -> None:
    random.seed(worker)


def _collate(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples) + random.random()


def _loader(data: Any = None, **options: Any) -> DataLoader[Tensor]:
    options = {"batch_size": BATCH, "shuffle": True} | options
    return DataLoader(Numbered(True) if data is None else data, **options)


def _of_lengths(**options: Any) -> dict[str, DataLoader[Tensor]]:
    return {"a": _loader(**options), "b": _loader(Numbered(True, 3 * BATCH), **options)}


_WORKERS: dict[str, Any] = {"num_workers": 2}
_PERSISTENT = _WORKERS | {"persistent_workers": True}

KINDS: dict[str, Callable[[], Any]] = {
    "noisy": _loader,
    "stream": lambda: _loader(Stream(), shuffle=False),
    "two": lambda: {"a": _loader(), "b": _loader(shuffle=False)},
    "persistent, plain": lambda: _loader(Numbered(False), **_PERSISTENT),
    "workers": lambda: _loader(**_WORKERS),
    "three workers": lambda: _loader(num_workers=3, prefetch_factor=1),
    "persistent": lambda: _loader(**_PERSISTENT),
    "own seeds": lambda: _loader(worker_init_fn=_seed_by_hand, collate_fn=_collate, **_WORKERS),
    "own generators": lambda: _loader(OwnGenerators()),
    "own generators in workers": lambda: _loader(OwnGenerators(False), **_PERSISTENT),
    "generator": lambda: _loader(generator=torch.Generator().manual_seed(42)),
    "generator, workers": lambda: _loader(generator=torch.Generator().manual_seed(42), **_WORKERS),
    "lengths": _of_lengths,
    "lengths, workers": lambda: _of_lengths(**_PERSISTENT),
    "shuffled stream": lambda: _loader(Stream("shuffled", True), shuffle=False),
    "stream in workers": lambda: _loader(Stream("shuffled", True), shuffle=False, **_WORKERS),
    "stream in persistent workers": lambda: _loader(Stream("shuffled", True), shuffle=False, **_PERSISTENT),
    "uncounted": lambda: DataLoader(Numbered(True), batch_sampler=Uncounted()),  # type: ignore[arg-type]
    "uncounted, workers": lambda: DataLoader(Numbered(True), batch_sampler=Uncounted(), **_WORKERS),  # type: ignore[arg-type]
}
