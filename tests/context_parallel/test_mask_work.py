"""Tokens are dealt out by the work that a mask leaves them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from lightning_megatron.context_parallel.mask_work import balance_of, mask_among, runs_by_work, work_of
from lightning_megatron.context_parallel.token_split import TokenSplit, zigzag_runs

TOKENS = 1024


def documents(mean: int, seed: int) -> torch.Tensor:
    """A mask of random documents of so many tokens on average, packed into a sequence."""
    draw, lengths = random.Random(seed), list[int]()
    while sum(lengths) < TOKENS:
        lengths.append(min(TOKENS - sum(lengths), max(4, int(draw.expovariate(1 / mean)))))
    return torch.block_diag(*(torch.ones(length, length).tril() for length in lengths)).bool()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("mean", [32, 64, 256, 4 * TOKENS])
def test_packed_documents_are_shared_evenly(mean, ranks):
    for seed in range(4):
        mask = documents(mean, seed)
        work = work_of(mask, ranks, true_hides=False)
        assert work is not None
        runs = runs_by_work(work, TOKENS, ranks)
        assert sorted(token for own in runs for run in own for token in range(*run)) == list(range(TOKENS))
        loads = [int(sum(mask[slice(*run)].sum() for run in own)) for own in runs]
        most = max(loads) * ranks / sum(loads)
        assert most == pytest.approx(balance_of(work, TOKENS, runs))
        assert most <= 1.10
        counts = [sum(stop - start for start, stop in own) for own in runs]
        assert max(counts) - min(counts) <= 16


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("length", [1024, 1021])
def test_causal_work_is_shared_evenly(length, ranks):
    split: Any = TokenSplit(None, length, zigzag_runs(length, ranks))  # type: ignore[arg-type]
    assert split.causal_balance <= 1.02


def test_windows_are_shared_evenly():
    at = torch.arange(TOKENS)
    mask = torch.zeros(2, 1, TOKENS, TOKENS).masked_fill((at > at[:, None]) | (at < at[:, None] - 99), -1e9)
    work = work_of(mask, 4, true_hides=False)
    assert work is not None
    assert balance_of(work, TOKENS, runs_by_work(work, TOKENS, 4)) <= 1.05


def test_what_hides_nothing_is_no_mask():
    x, mask = torch.randn(2, 6, 6), torch.ones(6, 6).triu(1).bool()
    assert mask_among(((x, torch.randn(2, 6, 4)), {"bias": mask.requires_grad_(False)}), 6, x) is mask
    assert work_of(torch.randn(2, 6, 6), 2, true_hides=False) is None
    assert work_of(mask, 2, true_hides=True) == [1, 2, 3, 4, 5, 6]
