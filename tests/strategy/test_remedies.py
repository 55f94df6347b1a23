"""What a message advises, tried on the module that it was about: it trains as one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_trainers
from tests.strategy import remedy_scenarios as written

WIDE = pytest.mark.wide
STAGES, TENSOR = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}


def _plan(up: str, down: str) -> dict[str, Any]:
    return {**TENSOR, "tensor_parallel_plan": {"*.fused": up, "*.out": down}}


CASES = [  # the module, its layout, words of the message, then what they advise: another module, or other arguments
    (written.TwiceLater, STAGES, "let the first step call them as often", written.TwiceAlways, {}, True),
    (written.KeepsLater, STAGES, "from the first step on (a zero will do)", written.KeepsZero, {}, False),
    (written.KeepsLater, STAGES, "from the first step on", written.KeepsAlways, {}, True),
    (written.Reentrant, STAGES, "pass `use_reentrant=False`", written.NotReentrant, {}, False),
    (written.SharedCheckpoint, STAGES, "one checkpoint per layer", written.NotReentrant, {}, True),
    (written.SharedCheckpoint, STAGES, "`activation_recompute=", written.Task, {"activation_recompute": "full"}, True),
    (
        written.GradientOfInput,
        STAGES,
        "only with respect to what the last layers gave",
        written.GradientOfLast,
        {},
        False,
    ),
    (written.CallsOutside, STAGES, "on every rank, under `torch.no_grad()`", written.CallsWithout, {}, False),
    (written.LossPerSample, STAGES, "takes scalars; got a tensor of shape (4,)", written.Task, {}, False),
    (
        written.CutsByContent,
        STAGES,
        "set `micro_batch_size` to the batch size, and `variable_shapes=True`",
        None,
        {"micro_batch_size": 4, "variable_shapes": True},
        True,
    ),
    (
        written.PenaltyBetween,
        STAGES,
        "keeps on itself (`self.penalty = x.square().mean()`) and the step reads",
        written.PenaltyKept,
        {},
        False,
    ),
    (written.LogsAcross, STAGES, "Log a value per part", written.LogsEach, {}, True),
    (written.BackwardInHook, TENSOR, "Add its loss to that of `training_step`", written.TermInStep, {}, False),
    (written.InPlaceOnView, TENSOR, "Index it in the assignment itself", written.ByIndex, {}, True),
    (
        written.Fused,
        _plan("colwise", "rowwise"),
        "use 'packed_colwise'",
        None,
        _plan("packed_colwise", "rowwise"),
        False,
    ),
    (
        written.FusedWhole,
        _plan("packed_colwise", "rowwise"),
        "use 'colwise_gather_output' and 'rowwise_split_input'",
        None,
        _plan("colwise_gather_output", "rowwise_split_input"),
        False,
    ),
]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("build", "layout", "words", "instead", "arguments"),
    [
        pytest.param(*case[:5], marks=WIDE if case[5] else (), id=f"{case[0].__name__}-{at}")
        for at, case in enumerate(CASES)
    ],
)
def test_what_a_message_advises_trains_as_one_process(
    build: Any, layout: dict[str, Any], words: str, instead: Any, arguments: dict[str, Any]
) -> None:
    for outcome in run_trainers(written.fit, build, layout, devices=2, check=False, grace=20, deadline=60):
        assert outcome.error is not None and words in f"{outcome.error}\n{outcome.output}"
    remedied = instead or build
    one = run_trainers(written.fit, remedied, None, devices=1)[0].value
    spread = run_trainers(written.fit, remedied, {**layout, **arguments}, devices=2)[0].value
    assert one.keys() == spread.keys()
    for name, weight in one.items():
        torch.testing.assert_close(spread[name], weight, rtol=1e-9, atol=1e-11)
