"""What steps write into Python state, they write once per batch in every layout, and hooks of every rank see it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_trainers
from tests.parity.scenario import Layout, differences
from tests.strategy import writing_scenarios as writing

PARTS = {"micro_batch_size": 2}
INTERLEAVED = PARTS | {"pipeline_schedule": "interleaved", "virtual_pipeline_parallel_size": 2}
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "stages": ((2, 1), PARTS),
    "alone": ((1, 1), PARTS),
    "four": ((4, 1), PARTS),
    "interleaved": ((2, 1), INTERLEAVED),
}
QUICK = {("stages", kind) for kind in ("lists", "globals", "iterators", "everywhere", "later", "entries")}
QUICK |= {("interleaved", "mask"), ("alone", "generators"), ("alone", "elements"), ("stages", "hits")}


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(layout, kind, marks=() if (layout, kind) in QUICK else pytest.mark.wide)
        for layout in LAYOUTS
        for kind in writing.KINDS
    ],
)
def test_steps_write_once_per_batch(layout: str, kind: str) -> None:
    (plain,) = run_trainers(writing.train, None, {}, kind, devices=1)
    shape, arguments = LAYOUTS[layout]
    outcomes = run_trainers(writing.train, shape, arguments, kind, devices=shape[0] * shape[1])
    for outcome in outcomes:
        wanted = plain.value if outcome is outcomes[0] else _python_of(plain.value)
        seen = outcome.value if outcome is outcomes[0] else _python_of(outcome.value)
        found = list(differences("", seen, wanted, 1e-9))
        assert not found, f"rank {outcome.rank}: " + "\n".join(found[:10])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("later_unlike", "writes `first`, which it did not write in the steps"),
        ("hits_of_all", "writes `seen` otherwise in one micro-batch of a batch than in another"),
    ],
)
@pytest.mark.parametrize("layout", ["stages", pytest.param("interleaved", marks=pytest.mark.wide)])
def test_what_micro_batches_first_write_unlike_in_a_later_step_is_refused(layout: str, kind: str, said: str) -> None:
    shape, arguments = LAYOUTS[layout]
    for outcome in run_trainers(writing.train, shape, arguments, kind, devices=2, check=False, grace=20.0):
        assert outcome.error is not None and "killed" not in outcome.error, f"rank {outcome.rank}: {outcome.error}"
        assert said in f"{outcome.error}\n{outcome.output}"


def _python_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name.startswith("python.")}
