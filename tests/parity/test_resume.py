"""At the same layout a resumed run is the uninterrupted one bit for bit, wherever it was stopped."""

from __future__ import annotations

import pytest

from tests.harness import run_trainers
from tests.parity.resume_scenarios import stopped_and_resumed

WIDE = pytest.mark.wide


@pytest.mark.parametrize(
    ("loader", "pipeline", "data"),
    [
        pytest.param("noisy", 2, 1),
        pytest.param("noisy", 1, 2, marks=WIDE),
        pytest.param("own", 1, 2),
        pytest.param("stream", 2, 1, marks=WIDE),
        pytest.param("two", 2, 1, marks=WIDE),
        pytest.param("workers", 2, 1, marks=WIDE),
        pytest.param("noisy", 2, 2, marks=WIDE),
    ],
)
def test_a_run_stopped_in_or_after_an_epoch_sees_the_same_samples_dropout_and_losses(
    loader: str, pipeline: int, data: int
) -> None:
    for outcome in run_trainers(stopped_and_resumed, loader, pipeline, data, devices=pipeline * data):
        assert not outcome.value, f"rank {outcome.rank}: " + "\n".join(outcome.value)
