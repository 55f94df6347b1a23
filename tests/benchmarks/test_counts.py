"""No path of a step makes many more calls than it did; stopwatches would fail when neighbours work."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.counts import PATHS, RECORD, measure


@pytest.mark.wide
@pytest.mark.parametrize("name", PATHS)
def test_a_step_makes_about_as_many_calls_as_recorded(name: str) -> None:
    recorded = json.loads(RECORD.read_text())[name]
    assert all(now < 1.1 * before for now, before in zip(measure(name), recorded, strict=True))
