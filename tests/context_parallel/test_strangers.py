"""Modules of strangers over context ranks, of which the number of tokens is no multiple: one process's numbers."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.context_parallel.stranger_modules import MASKS, MIXERS, POOLED, train
from tests.harness import one_process, run_trainers

METHODS = ("gather", "ring", "ulysses")
LEVELS = ("ulysses", 2)
FIRST = (("given", 3, "ring"), ("dead", 2, "ring"), ("window", 2, "ulysses"), ("function", 2, "gather"))
ROWS = [
    row if row in FIRST else pytest.param(*row, marks=pytest.mark.wide)
    for row in itertools.product((*MASKS, *MIXERS, *POOLED), (2, 3), METHODS)
    if row != ("grouped", 3, "ulysses")  # two heads of keys over three ranks, which is refused
] + [
    ("packed", 4, LEVELS),
    *(pytest.param(kind, 4, LEVELS, marks=pytest.mark.wide) for kind in (*MASKS, "eager", "grouped", "last")),
]


@pytest.mark.parametrize(("kind", "size", "method"), ROWS)
def test_a_stranger_trains_as_in_one_process(kind, size, method):
    wanted = one_process(train, kind, 0, "gather")
    for outcome in run_trainers(train, kind, size, method, devices=size):
        assert set(outcome.value) == set(wanted)
        for name, value in wanted.items():
            found = torch.as_tensor(outcome.value[name])
            assert torch.allclose(found, torch.as_tensor(value), rtol=1e-9, atol=1e-9), name


def test_heads_that_ranks_cannot_share_are_refused_on_every_rank():
    for outcome in run_trainers(train, "grouped", 3, "ulysses", devices=3, check=False, grace=20.0):
        assert "cannot divide 6 heads (2 key-value heads)" in f"{outcome.error}\n{outcome.output}", outcome
