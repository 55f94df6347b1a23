"""In which steps the last stage looks everywhere for what its step writes, which takes reading all of its code."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_megatron.pipeline.stage.order import CalledAgain, StageDone
from lightning_megatron.strategy.logs.written_beside import WrittenBeside


def looks_in(steps: int, step: Any, ends: type[BaseException] | None, runs: int = 4) -> list[int]:
    """Numbers of the steps that are looked at, of those that run ``runs`` micro-batches; each ends by an exception."""
    beside = WrittenBeside(nn.Linear(2, 2), (), lambda value: True)
    found = []
    for number in range(1, steps + 1):
        call = beside.looks(step, "training_step")
        found += [number] if call is not step else []
        for _ in range(runs if ends else 0):
            with pytest.raises(ends):  # type: ignore[arg-type]
                call(None)
    return found


def ends_where_its_layers_do(batch: Any) -> Any:
    raise StageDone


def calls_the_layers_again(batch: Any) -> Any:
    raise CalledAgain


def test_runs_that_end_at_an_earlier_chunk_of_layers_are_looked_at_as_seldom_as_others() -> None:
    assert looks_in(70, len, None) == [1, 8, 64]
    assert looks_in(70, ends_where_its_layers_do, StageDone) == [1, 8, 64]


def test_a_step_that_is_started_over_is_looked_at_again() -> None:
    assert looks_in(3, calls_the_layers_again, CalledAgain, runs=1) == [1, 2, 3]
