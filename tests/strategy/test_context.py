"""Every loop of a Trainer over context ranks; what they cannot do is refused at once, or in the first step."""

from __future__ import annotations

import pytest
import torch

from lightning_megatron import MegatronStrategy
from tests.harness import one_process, run_trainers
from tests.strategy.context_scenarios import every_loop, fit, updates

OPTIONS = [
    ({"context_parallel_size": 0}, "`context_parallel_size=0` must be an integer"),
    ({"context_parallel_size": True}, "must be an integer"),
    ({"context_parallel_size": 2, "compile_layers": True}, "`compile_layers=False`"),
    (
        {
            **{"context_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True},
            "random_streams": "layout",
        },
        "random_streams='torch'",
    ),
    ({"context_parallel_size": 2, "layout": "auto"}, "`layout=None`"),
    ({"context_parallel_options": {"method": "gather"}}, "`context_parallel_size=1`; set it"),
    ({"context_parallel_size": 2, "context_parallel_options": {"method": "rings"}}, "use 'gather'"),
    (
        {"context_parallel_size": 6, "context_parallel_options": {"method": ("ulysses", 4)}},
        "('ulysses', 4)}` must divide `context_parallel_size=6`; use 1, 2, 3 or 6",
    ),
    ({"context_parallel_size": 2, "context_parallel_options": {"method": ("ring", 2)}}, "or ('ulysses', n)"),
    ({"context_parallel_size": 2, "context_parallel_options": {"balance": "odd"}}, "'zigzag' or 'block'"),
    ({"context_parallel_size": 2, "context_parallel_options": {"whole": []}}, "known options are method, balance"),
]


@pytest.mark.parametrize(("arguments", "wanted"), OPTIONS, ids=[str(arguments) for arguments, _ in OPTIONS])
def test_options_that_are_not_there_are_refused_at_once(arguments, wanted):
    with pytest.raises(ValueError, match="context_parallel") as error:
        MegatronStrategy(**arguments)
    assert wanted in str(error.value)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("penalty", "a gradient was taken inside the step"),
        pytest.param("hooked", "a backward hook of `net.layers.0`", marks=pytest.mark.wide),
        pytest.param("watched", "a gradient hook of `", marks=pytest.mark.wide),
        pytest.param("short", "was given 1 tokens, fewer than `context_parallel_size=2`", marks=pytest.mark.wide),
        pytest.param("byhand", "`automatic_optimization=False`", marks=pytest.mark.wide),
    ],
)
def test_steps_that_a_rank_would_know_in_part_are_refused_on_every_rank(name, wanted):
    for outcome in run_trainers(fit, name, {}, devices=2, check=False, grace=20.0):
        assert outcome.error is not None and "killed" not in outcome.error, outcome
        assert wanted in f"{outcome.error}\n{outcome.output}", outcome.error


@pytest.mark.wide
def test_a_precision_that_is_not_there_is_refused_on_every_rank():
    for outcome in run_trainers(fit, "plain", {"precision": "16-true"}, devices=2, check=False, grace=20.0):
        assert "`precision='16-true'`" in str(outcome.error), outcome


SIXTEEN_BIT = [
    ("bf16-mixed", 2, {"method": "ring"}),
    *(
        pytest.param(*row, marks=pytest.mark.wide)
        for row in (
            ("bf16-mixed", 2, {"method": "gather"}),
            ("bf16-mixed", 2, {"method": "ulysses"}),
            ("bf16-mixed", 3, {"method": "ring"}),
            ("bf16-true", 2, {"method": "gather"}),
            ("bf16-true", 3, {"method": "ring"}),
        )
    ),
]


@pytest.mark.parametrize(("precision", "size", "options"), SIXTEEN_BIT)
def test_16_bits_round_no_more_than_in_one_process(precision, size, options):
    exact, rounded = (one_process(updates, 0, {}, kind) for kind in ("64-true", precision))
    found = run_trainers(updates, size, options, precision, devices=size)[0].value
    errors = [float((each - exact).norm() / exact.norm()) for each in (rounded, found)]
    assert 0 < errors[0] < 0.2 and errors[1] < 1.5 * errors[0], errors


LOOPS = [
    (2, "ring"),
    *(pytest.param(*row, marks=pytest.mark.wide) for row in ((2, "gather"), (3, "gather"), (3, "ring"))),
]


@pytest.mark.parametrize(("size", "method"), LOOPS)
def test_every_loop_gives_what_one_process_gives(size, method):
    wanted = one_process(every_loop, 0, "gather")
    for outcome in run_trainers(every_loop, size, method, devices=size):
        assert set(outcome.value) == set(wanted)
        for name, value in wanted.items():
            assert torch.allclose(torch.tensor(outcome.value[name]), torch.tensor(value), rtol=1e-9), name
