"""What steps keep in unusual places is what one process keeps there, and so is what they make of it."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from lightning_megatron.strategy.loss.written import sum_of_all, tail_of
from tests.harness import one_process, run_trainers
from tests.parity.scenario import Layout, differences
from tests.strategy.place_scenarios import PLACES, kept_there

LAYOUTS: list[tuple[Layout, dict[str, Any]]] = [((2, 1), {}), ((1, 1), {}), ((1, 2), {"micro_batch_size": "auto"})]


@pytest.mark.everyday(2)
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize(("layout", "arguments"), LAYOUTS, ids=["stages", "micro-batches", "replicas"])
def test_steps_go_on_from_what_they_keep_in_unusual_places(layout: Layout, arguments: Any, name: str) -> None:
    plain = one_process(kept_there, None, name, {})
    for outcome in run_trainers(kept_there, layout, name, arguments, devices=layout[0] * layout[1]):
        wanted = plain if outcome.rank == 0 else plain | {"weights": {}}
        found = list(differences("", outcome.value, wanted, 1e-9))
        assert not found, f"rank {outcome.rank}: " + "\n".join(found[:10])


def test_unlike_values_under_a_key_that_a_later_step_makes_are_refused() -> None:
    for outcome in run_trainers(kept_there, (1, 1), "UnderKeyOfLoss", {}, devices=1, check=False):
        assert outcome.error is not None
        assert "writes `calls.7`, which it did not write in the steps" in outcome.error, outcome.error


def test_what_was_appended_to_a_long_list_or_a_full_deque_is_found_at_once() -> None:
    numbers = [0.0] * 100_000
    assert tail_of(numbers, [*numbers, 1.0, 2.0]) == [1.0, 2.0]
    assert tail_of(numbers, [1.0, *numbers[1:]]) is None
    assert tail_of(numbers, numbers[1:]) is None
    full = deque(range(50_000), maxlen=50_000)
    assert tail_of(full, deque([*full, 1, 2], maxlen=50_000)) == [1, 2]
    assert tail_of(full, deque([1, *range(3, 50_000), 0, 0], maxlen=50_000)) is not None  # all of it
    assert tail_of(deque([2, 0], maxlen=3), deque([0, 0], maxlen=3)) is None


def test_arrays_add_up_in_their_own_dtype() -> None:
    before = np.array([1, 2], dtype=np.int32)
    both = sum_of_all(before, [before + np.int32(1), before + np.int32(2)])
    assert both.tolist() == [4, 5] and both.dtype == np.int32
    assert type(sum_of_all(np.float64(1), [np.float64(2), np.float64(3)])) is np.float64
