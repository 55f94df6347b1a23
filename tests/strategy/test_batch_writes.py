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
QUICK = {("stages", "tokens"), ("interleaved", "tokens"), ("stages", "shared"), ("zb-v", "key"), ("alone", "targets")}
ROWS = [
    pytest.param(*row, marks=[] if row in QUICK else [pytest.mark.wide])
    for row in itertools.product(LAYOUTS, writes.KINDS)
]


@pytest.mark.parametrize(("layout", "kind"), ROWS)
def test_a_step_that_writes_into_its_batch_trains_as_in_one_process(layout: str, kind: str) -> None:
    (plain,) = run_trainers(writes.train, None, {}, kind, devices=1)
    sizes, arguments = LAYOUTS[layout]
    ranks = sizes[0] * sizes[1] * arguments.get("tensor_parallel_size", 1) * arguments.get("context_parallel_size", 1)
    outcomes = run_trainers(writes.train, sizes, arguments, kind, devices=ranks)
    found = list(differences("", outcomes[0].value["state"], plain.value["state"], 1e-9))
    assert not found, "\n".join(found[:10])
    for outcome in outcomes if sizes[1] == 1 and kind != "key" else []:
        found = list(differences("", outcome.value["batches"], plain.value["batches"], 1e-9))
        assert not found, f"rank {outcome.rank}:\n" + "\n".join(found[:10])
