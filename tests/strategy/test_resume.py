"""At the same layout a resumed run is the uninterrupted one bit for bit, wherever it was stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_trainers
from tests.strategy.chain_scenarios import Chain, chained
from tests.strategy.loader_kinds import KINDS
from tests.strategy.resume_scenarios import STOPS, samples_of, stopped_and_resumed

WIDE = pytest.mark.wide


@pytest.mark.parametrize(
    ("loader", "pipeline", "data"),
    [
        pytest.param("noisy", 2, 1, marks=WIDE),
        pytest.param("noisy", 1, 2, marks=WIDE),
        pytest.param("own", 1, 2),
        pytest.param("stream", 2, 1, marks=WIDE),
        pytest.param("two", 2, 1, marks=WIDE),
        pytest.param("workers", 2, 1, marks=WIDE),
        pytest.param("persistent", 1, 2, marks=WIDE),
        pytest.param("noisy", 2, 2, marks=WIDE),
        *(pytest.param(kind, 1, 1, marks=WIDE) for kind in KINDS),
    ],
)
def test_a_run_stopped_in_or_after_an_epoch_sees_the_same_samples_dropout_and_losses(
    loader: str, pipeline: int, data: int
) -> None:
    for outcome in run_trainers(stopped_and_resumed, loader, pipeline, data, devices=pipeline * data):
        assert not outcome.value, f"rank {outcome.rank}: " + "\n".join(outcome.value)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    "chain",
    [
        Chain("persistent", pipeline=2, stops=(2, 5, 8)),
        Chain(data=2, limit=True, validates=False),
        pytest.param(Chain(pipeline=2, stops=(2, 5, 8)), marks=WIDE),
        pytest.param(Chain(pipeline=2), marks=WIDE),
        pytest.param(Chain("persistent", hook="on_train_epoch_end", stops=(5, 10)), marks=WIDE),
        pytest.param(Chain("persistent", stops=(2, 3, 5, 8, 11)), marks=WIDE),
        pytest.param(Chain("own generators in workers", stops=(2, 3, 5, 8, 11)), marks=WIDE),
        pytest.param(Chain("generator, workers", stops=(5, 8, 10), limit=True, validates=False), marks=WIDE),
        pytest.param(Chain("persistent", stops=(2, 3, 4, 7), interval=2), marks=WIDE),
        pytest.param(Chain(pipeline=2, stops=(2, 4, 6), interval=2), marks=WIDE),
        pytest.param(Chain("uncounted, workers", stops=(2, 3, 5, 8, 11)), marks=WIDE),
        pytest.param(Chain("uncounted", hook="on_validation_end", stops=(5, 10)), marks=WIDE),
        pytest.param(Chain(tensor=2), marks=WIDE),
        pytest.param(Chain("packed", pipeline=2, stops=(3, 6, 9)), marks=WIDE),
        pytest.param(Chain("ordered", data=2, limit=True), marks=WIDE),
        pytest.param(Chain("workers", pipeline=2, stops=(5, 8)), marks=WIDE),
        pytest.param(Chain(pipeline=2, accumulate=2, stops=(3, 5, 6, 8)), marks=WIDE),
        pytest.param(Chain(pipeline=2, limit=True), marks=WIDE),
        pytest.param(Chain(pipeline=2, hook="on_validation_end", stops=(5, 10)), marks=WIDE),
        pytest.param(Chain(data=2, hook="on_train_epoch_end", stops=(5, 10)), marks=WIDE),
        pytest.param(Chain(pipeline=2, hook="on_train_epoch_end", stops=(5, 10), limit=True), marks=WIDE),
        pytest.param(Chain(pipeline=2, data=2), marks=WIDE),
    ],
)
def test_a_run_resumed_at_the_end_of_an_epoch_and_again_after_it_tells_the_same_story(chain: Chain) -> None:
    for outcome in run_trainers(chained, chain, devices=chain.ranks, deadline=400.0):
        assert not outcome.value, f"rank {outcome.rank}: " + "\n".join(outcome.value)


@pytest.mark.parametrize(
    ("shuffle", "first", "second"),
    [
        (True, 1, 2),
        (True, 2, 1),
        pytest.param(False, 1, 2, marks=WIDE),
        pytest.param(False, 2, 1, marks=WIDE),
        pytest.param(True, 1, 1, marks=WIDE),
    ],
)
def test_the_order_of_the_run_that_was_saved_goes_on_with_any_number_of_replicas(
    shuffle: bool, first: int, second: int, tmp_path: Path
) -> None:
    whole = run_trainers(samples_of, shuffle, first, None, str(tmp_path), devices=first)[0].value
    path = str(tmp_path / f"step{STOPS[0]}.ckpt")
    rest = run_trainers(samples_of, shuffle, second, path, devices=second)[0].value
    assert rest == whole[STOPS[0] :] and len(rest) > 0
