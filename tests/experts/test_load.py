"""The load of experts, counted over all ranks, is that of one process."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_megatron.callbacks import ExpertLoad
from tests.experts.load_scenarios import loads
from tests.harness import run_trainers

WIDE = pytest.mark.wide
PIPE: dict[str, Any] = {"pipeline_parallel_size": 2, "micro_batch_size": 2}
ROWS: list[Any] = [
    ("words", 4, {**PIPE, "expert_parallel_size": 2}),
    *(
        pytest.param(*row, marks=WIDE)
        for row in (
            ("words", 2, {}),
            ("Mixtral", 2, {"tensor_parallel_size": 2}),
            ("words", 2, {"micro_batch_size": 2, "log_expert_load": True}),
            ("words", 2, {**PIPE, "pipeline_schedule": "zb-v", "activation_recompute": "full"}),
            ("uneven", 4, {**PIPE, "expert_parallel_size": 2, "pipeline_layers": "layers"}),
            ("strange_masked", 2, {"expert_parallel_size": 2, "activation_recompute": "full"}),
            ("strange_dense", 4, {**PIPE, "expert_parallel_size": 2}),
            ("strange_loop", 2, PIPE),
            ("strange_halves", 2, {"expert_parallel_size": 2}),
            ("strange_groups", 2, {"expert_parallel_size": 2}),
            ("Mixtral", 2, {"expert_parallel_size": 2}),
        )
    ),
]


@pytest.mark.wide
@pytest.mark.parametrize(("name", "devices", "options"), ROWS, ids=str)
def test_the_load_of_experts_is_that_of_one_process(name, devices, options):
    expected = run_trainers(loads, name, {}, {}, devices=1)[0].value
    for outcome in run_trainers(loads, name, options, {}, devices=devices):
        assert outcome.value["load"] == expected["load"]
        assert outcome.value["steps"] == expected["steps"] == [1, 2, 3]
        logged = {key: value for key, value in outcome.value["logged"].items() if key != "expert_load_ranks"}
        assert logged == expected["logged"]
        assert ("expert_load_ranks" in outcome.value["logged"]) == ("expert_parallel_size" in options)


@pytest.mark.wide
def test_starved_experts_show(tmp_path):
    pytest.importorskip("matplotlib")
    found = run_trainers(loads, "starved", {"expert_parallel_size": 2}, {}, str(tmp_path), devices=2)[0].value
    assert found["load"]["layers.0.experts"] == [[96, 96, 0, 0]] * 3
    assert found["logged"]["expert_load"] == 2.0
    assert found["logged"]["expert_load_ranks"] == 2.0
    assert "rows / mean" in (tmp_path / "expert-load.svg").read_text()


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("dense", {}, "found no mixture of experts"),
        ("words", {"tensor_parallel_size": 2, "sequence_parallel": True}, "`sequence_parallel=False`"),
        ("words", {"compile_layers": True}, "`compile_layers=False`"),
    ],
)
def test_what_cannot_be_counted_is_refused(name, options, wanted):
    for outcome in run_trainers(loads, name, options, {}, devices=2, check=False, grace=20.0):
        assert wanted in str(outcome.error)


def test_no_steps_between_counts_are_refused():
    with pytest.raises(ValueError, match="`every=0`"):
        ExpertLoad(every=0)
