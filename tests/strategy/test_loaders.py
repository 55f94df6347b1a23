"""A loader that can be resumed gives what it gave before, and takes its workers' states along."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_megatron.strategy.data.generators import generators_in, restore_states, states_of
from lightning_megatron.strategy.data.loaders import make_resumable
from lightning_megatron.strategy.data.walk import walk_of
from tests.strategy.loader_kinds import BATCH, KINDS, Numbered, OwnGenerators


def _two_passes(loader: Any) -> list[Any]:
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)
    return [batch.tolist() for _ in range(2) for batch in loader]


@pytest.mark.parametrize("kind", ["own seeds", "persistent", "stream in workers", "generator", "uncounted"])
def test_batches_of_an_undisturbed_run_are_those_of_a_plain_loader(kind: str) -> None:
    assert _two_passes(make_resumable(KINDS[kind]())) == _two_passes(KINDS[kind]())


def test_nothing_is_sent_along_while_workers_draw_nothing() -> None:
    loader = make_resumable(DataLoader(Numbered(False), BATCH, num_workers=1))
    list(loader)
    assert walk_of(loader).made is not None
    for noisy in (False, True):
        loader = make_resumable(DataLoader(Numbered(noisy), BATCH, num_workers=1))
        batches = iter(loader)
        next(batches)
        state = walk_of(loader).state(loader, 1, 0)["workers"]
        assert (state["given_out"][0] is not None) == noisy and state["batches"] == 1
        assert isinstance(loader.collate_fn, type(torch.utils.data.default_collate)), "the loader itself stays"


def test_generators_are_found_and_restored() -> None:
    data = OwnGenerators()
    found = generators_in({"dataset": data})
    assert set(found) == {"dataset.sources.numpy", "dataset.sources.old", "dataset.inner.0", "dataset.torch"}
    states = states_of(found)
    before = [data[i] for i in range(3)]
    restore_states(found, states)
    assert all(torch.equal(data[i], value) for i, value in enumerate(before))
