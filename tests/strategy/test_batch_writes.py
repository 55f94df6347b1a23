"""Steps that write into their batch train as in one process, and leave the batch as it leaves it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.harness import run_trainers
from tests.parity.scenario import differences
from tests.strategy import batch_write_scenarios as writes

LAYOUTS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "stages": ((2, 1), {}),
    "alone": ((1, 1), {"micro_batch_size": 2}),
    "interleaved": ((2, 1), {"pipeline_schedule": "interleaved", "virtual_pipeline_parallel_size": 2}),
    "zb-v": ((2, 1), {"pipeline_schedule": "zb-v"}),
    "tensor": ((1, 1), {"tensor_parallel_size": 2}),
    "context": ((1, 1), {"context_parallel_size": 2}),
    "recomputed": ((2, 1), {"activation_recompute": "full"}),
}
QUICK = {
    *(("stages", "tokens"), ("interleaved", "tokens"), ("stages", "shared"), ("zb-v", "key"), ("alone", "targets")),
    *(("stages", "nested"), ("alone", "alias"), ("stages", "behind")),
}
QUICK_VALIDATED = {("stages", "key"), ("interleaved", "tokens"), ("stages", "behind"), ("in parts", "nested")}
ROWS = [
    pytest.param(*row, marks=[] if row in QUICK else [pytest.mark.wide])
    for row in itertools.product(LAYOUTS, writes.KINDS)
]


VALIDATED = LAYOUTS | {
    "in parts": ((2, 1), {"evaluation_micro_batch_size": 2}),
    "interleaved, in parts": ((2, 1), LAYOUTS["interleaved"][1] | {"evaluation_micro_batch_size": 2}),
}
ROWS_VALIDATED = [
    pytest.param(*row, marks=[] if row in QUICK_VALIDATED else [pytest.mark.wide])
    for row in itertools.product(VALIDATED, writes.KINDS)
]


@pytest.mark.everyday(2)
@pytest.mark.parametrize(("layout", "kind"), ROWS)
def test_a_step_that_writes_into_its_batch_trains_as_in_one_process(layout: str, kind: str) -> None:
    (plain,) = run_trainers(writes.train, None, {}, kind, devices=1)
    for outcome in _run(writes.train, LAYOUTS[layout], kind):
        _compare(outcome, plain)


@pytest.mark.parametrize(("layout", "kind"), ROWS_VALIDATED)
def test_a_validation_step_that_writes_into_its_batch_is_that_of_one_process(layout: str, kind: str) -> None:
    (plain,) = run_trainers(writes.evaluate, None, {}, kind, devices=1)
    for outcome in _run(writes.evaluate, VALIDATED[layout], kind):
        _compare(outcome, plain)


def _run(function: Any, layout: tuple[tuple[int, int], dict[str, Any]], kind: str) -> list[Any]:
    sizes, arguments = layout
    ranks = sizes[0] * sizes[1] * arguments.get("tensor_parallel_size", 1) * arguments.get("context_parallel_size", 1)
    return run_trainers(function, sizes, arguments, kind, devices=ranks)


def _compare(outcome: Any, plain: Any) -> None:
    keys = set(outcome.value) - ({"state"} if outcome.rank else set())  # only rank 0 has the whole state
    for key in keys:
        found = list(differences("", outcome.value[key], plain.value[key], 1e-9))
        assert not found, f"rank {outcome.rank}, {key}:\n" + "\n".join(found[:10])
