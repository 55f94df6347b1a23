"""States of optimizers and of the module, and parameters around an optimizer's step, are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import one_process, run_trainers
from tests.parity.scenario import Layout, differences
from tests.strategy import state_scenarios as states

LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "pp2": ((2, 1), {}),
    "tp2": ((1, 1), {"tensor_parallel_size": 2, "micro_batch_size": "auto"}),
    "dp2": ((1, 2), {"micro_batch_size": "auto"}),
    "dp2xpp2": ((2, 2), {}),
    "dp2xtp2": ((1, 2), {"tensor_parallel_size": 2, "micro_batch_size": "auto"}),
}
QUICK = {("dp2", "ReadsState"), ("tp2", "ByHook"), ("pp2", "Listed")}


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(layout, kind, marks=() if (layout, kind) in QUICK else pytest.mark.wide)
        for layout in LAYOUTS
        for kind in states.KINDS
    ],
)
def test_hooks_see_the_states_of_one_process(layout: str, kind: str) -> None:
    wanted = one_process(states.run, None, {}, kind)
    shape, arguments = LAYOUTS[layout]
    devices = shape[0] * shape[1] * arguments.get("tensor_parallel_size", 1)
    for outcome in run_trainers(states.run, shape, arguments, kind, devices=devices):
        expected = {name: value for name, value in wanted.items() if name in outcome.value and name != "alone"}
        assert not list(differences("", {n: outcome.value[n] for n in expected}, expected, 1e-9)), outcome.rank
        alone = wanted["alone"] if outcome.rank == 0 else None
        assert not list(differences("alone", outcome.value["alone"], alone, 1e-9)), outcome.rank
