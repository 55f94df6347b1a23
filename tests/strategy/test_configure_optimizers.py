"""``configure_optimizers``, and what else runs beside steps, sees shapes and values of one process, though weights are
split or on other stages.
"""

from __future__ import annotations

import pytest

from tests.harness import one_process, run_trainers
from tests.parity.scenario import differences
from tests.strategy.optimizer_scenarios import Sizes, seen_outside, trained

wide = pytest.mark.wide
ROWS = [
    *((kind, (1, 1, 2), {}) for kind in ("FanIn", "ByNorm", "Following")),
    *((kind, (1, 1, 2), {}) for kind in ("ByNumber", "Anchored", "OnOneRank")),
    *((kind, (2, 1, 2), {}) for kind in ("FanIn", "ByNumber", "Following")),
    *((kind, (1, 2, 2), {"sequence_parallel": True}) for kind in ("FanIn", "ByNorm", "Anchored")),
    *((kind, (2, 1, 1), {}) for kind in ("FanIn", "Following")),
    *((kind, (1, 2, 1), {}) for kind in ("ByNorm", "Anchored", "Following")),
    *((kind, (1, 1, 2), {}) for kind in ("Schedule", "GradientSchedule", "NormSchedule")),
    *((kind, (2, 1, 1), {}) for kind in ("Schedule", "GradientSchedule")),
    *((kind, (2, 1, 2), {}) for kind in ("Schedule", "GradientSchedule")),
]


@pytest.mark.everyday(3)
@pytest.mark.parametrize(("kind", "sizes", "options"), ROWS, ids=str)
def test_optimizers_are_those_of_one_process(kind: str, sizes: Sizes, options: dict[str, object]) -> None:
    outcomes = run_trainers(trained, kind, sizes, options, devices=sizes[0] * sizes[1] * sizes[2])
    assert not list(differences("", outcomes[0].value, one_process(trained, kind), 1e-9))


def test_values_of_weights_on_another_stage_are_refused_with_the_line() -> None:
    for outcome in run_trainers(trained, "ByNorm", (2, 1, 1), devices=2, check=False, grace=20):
        said = f"{outcome.error}{outcome.trace}"
        assert "`configure_optimizers` computes with values of weights that another pipeline stage has" in said
        assert "optimizer_scenarios.py:" in said


@pytest.mark.parametrize(
    ("sizes", "kind", "data"),
    [
        ((1, 1, 2), "Outside", False),
        pytest.param((1, 1, 2), "Looking", True, marks=wide),
        pytest.param((1, 1, 4), "Outside", False, marks=wide),
        pytest.param((2, 1, 1), "OutsideStages", False, marks=wide),
        pytest.param((2, 1, 2), "OutsideStages", False, marks=wide),
    ],
    ids=str,
)
def test_code_beside_steps_sees_whole_tensors(sizes: Sizes, kind: str, data: bool) -> None:
    expected, _ = one_process(seen_outside, None, kind, data)
    outcomes = run_trainers(seen_outside, sizes, kind, data, devices=sizes[0] * sizes[2])
    for outcome in outcomes:
        found, is_plain = outcome.value
        assert not list(differences("", found, expected, 1e-9))
        assert is_plain or sizes[0] > 1  # a module that is cut keeps its way to list what other stages have


@pytest.mark.everyday(1)
@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 1, 2), (1, 2, 2)], ids=str)
def test_a_backward_that_reads_gradients_is_refused_with_the_hook_that_does_it(sizes: Sizes) -> None:
    devices = sizes[1] * sizes[2]
    for outcome in run_trainers(trained, "NormsBackward", sizes, devices=devices, check=False, grace=20):
        assert "`LightningModule.backward` is overridden and uses" in str(outcome.error), outcome
    for kind in ("NormsAfter", "HalvesBackward"):
        found = run_trainers(trained, kind, sizes, devices=devices)[0].value
        assert not list(differences("", found, one_process(trained, kind), 1e-9))
