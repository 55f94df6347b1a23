"""Compiled layers: the numbers of uncompiled ones, and one compilation for all of them.

Compiling takes seconds per process. Every day, test_lifted.py compiles the layers of two stages, this file those of
one process and of two tensor ranks.
"""

from __future__ import annotations

from typing import Any

import pytest

from lightning_megatron import MegatronStrategy
from tests.harness import run_trainers
from tests.pipeline.compile_scenarios import compiled

EAGER = {"backend": "aot_eager"}  # everything but the C++ compiler, which takes its time


@pytest.mark.wide
@pytest.mark.parametrize(
    ("config", "sizes", "devices"),
    [
        pytest.param("llama", {"pipeline_parallel_size": 2, "compile_layers": EAGER}, 2, marks=pytest.mark.wide),
        ("gpt", {"tensor_parallel_size": 2, "compile_layers": EAGER}, 2),
        ("llama", {"compile_layers": EAGER, "activation_recompute": "full"}, 1),
        pytest.param("llama", {"compile_layers": True}, 1, marks=pytest.mark.wide),
        pytest.param(
            "gpt",
            {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved", "compile_layers": EAGER},
            2,
            marks=pytest.mark.wide,
        ),
    ],
)
def test_compiled_layers_give_the_same_losses_from_code_that_all_layers_share(
    config: str, sizes: dict[str, Any], devices: int
) -> None:
    sizes = {**sizes, "micro_batch_size": 2}
    plain = {name: value for name, value in sizes.items() if name != "compile_layers"}
    expected = run_trainers(compiled, config, plain, devices=devices)
    outcomes = run_trainers(compiled, config, sizes, devices=devices, deadline=300)
    for outcome, reference in zip(outcomes, expected, strict=True):
        losses, graphs, breaks = outcome.value
        assert (reference.value[1], graphs > 0) == (0, True)
        assert losses == pytest.approx(reference.value[0], abs=1e-9)
        if "tensor_parallel_size" not in sizes:  # else collectives run between the compiled pieces of a layer
            assert breaks == 0


@pytest.mark.wide
def test_twice_the_layers_are_compiled_no_more_often() -> None:
    sizes = {"compile_layers": EAGER, "micro_batch_size": 2}
    graphs = [run_trainers(compiled, config, sizes, devices=1)[0].value[1] for config in ("llama", "deep")]
    assert graphs == [2, 2], "one graph to train and one to validate"


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ({"compile_layers": "yes"}, "compile_layers='yes'.*max-autotune"),
        ({"compile_layers": True, "pipeline_schedule": "zb-v"}, "zb-v.*1f1b"),
        ({"compile_layers": True, "activation_recompute": "selective"}, "selective.*full"),
    ],
)
def test_what_cannot_be_compiled_is_refused(arguments: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        MegatronStrategy(pipeline_parallel_size=2, **arguments)
