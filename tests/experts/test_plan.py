"""Experts that a plan names train as in one process, and a plan that cannot be meant is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron import MegatronStrategy
from lightning_megatron.experts.by_plan import ExpertPlan
from lightning_megatron.experts.split import ExpertSplit
from tests.experts.expert_scenarios import fit
from tests.experts.planned import PLANNED
from tests.harness import one_process, run_trainers

WIDE = pytest.mark.wide
E2, E4 = {"expert_parallel_size": 2}, {"expert_parallel_size": 4}
T2: dict[str, Any] = {"tensor_parallel_size": 2}
PIPE: dict[str, Any] = {"pipeline_parallel_size": 2, "micro_batch_size": 2}
GRID: list[Any] = [
    (2, E2, {}),
    (4, {**E2, "optimizer_sharding": False}, {"accumulate_grad_batches": 2}),
    (4, E4, {}),
    (2, {**T2, **E2}, {}),
    (4, {**T2, **E4}, {}),
    (4, {**PIPE, **E2}, {}),
    (4, {**E2, "overlap_parameter_gather": True}, {}),
    (4, {**PIPE, **E2, "pipeline_schedule": "zb-v", "activation_recompute": "full"}, {}),
    (8, {**PIPE, **E4, "pipeline_schedule": "interleaved"}, {}),
]
ROWS = [
    ("turns", 2, E2, {}),
    ("listed", 4, {**T2, **E2}, {}),
    ("adapted", 2, E2, {}),
    ("frozen", 2, E2, {}),
    *(
        pytest.param(name, *cell, marks=WIDE)
        for name in PLANNED
        for cell in (GRID[::3] if name in ("unlike", "by_place", "picked") else GRID)
        if name not in ("shelves", "adapted") or "activation_recompute" not in cell[1]  # read by the layer around it
    ),
]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("name", "devices", "options", "trainer"), ROWS, ids=str)
def test_experts_named_by_a_plan_train_as_in_one_process(name, devices, options, trainer):
    expected = one_process(fit, f"planned_{name}", None, trainer)
    given = {**options, "expert_parallel_plan": PLANNED[name][1]}
    found = [outcome.value for outcome in run_trainers(fit, f"planned_{name}", given, trainer, devices=devices)]
    for value in found:
        assert value["losses"] == pytest.approx(expected["losses"], rel=1e-10)
    assert set(found[0]["weights"]) == set(expected["weights"])
    for key, value in found[0]["weights"].items():
        torch.testing.assert_close(value, expected["weights"][key], rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.wide
@pytest.mark.parametrize("options", [E2, *(pytest.param({**E2, **more}, marks=WIDE) for more in (T2, PIPE))], ids=str)
def test_weights_of_experts_are_whole_to_the_layer_around_them(options):
    expected = one_process(fit, "reading", None, {})
    found = run_trainers(fit, "reading", options, {}, devices=4 if options == {**E2, **PIPE} else 2)[0].value
    for key, value in found["weights"].items():
        torch.testing.assert_close(value, expected["weights"][key], rtol=1e-9, atol=1e-9, msg=key)


LISTED = ("layers.*.experts.*.*.weight", "layers.*.experts.*.*.bias")


class Net(nn.Module):
    """A module to plan for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([PLANNED["turns"][0]() for _ in range(2)])


def test_a_plan_is_spread_over_the_names_that_it_means():
    plan = ExpertPlan.of({"layers.*.bank": "experts", "bank.up": 1, "1.router": "whole"}, Net())
    assert plan.kinds == {"layers.0.bank": "experts", "layers.1.bank": "experts", "layers.1.router": "whole"}
    assert plan.dims_in("layers.1.bank") == {"up": 1}


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("soft", {"layers.*": "gathered"}),
        ("listed", {"layers.*": "gathered", "layers.*.up.*": 0, "layers.*.down.*": 0}),
        ("unlike", {"layers.*": "gathered", **dict.fromkeys(LISTED, 0)}),
        ("by_place", {"layers.*": "gathered", **dict.fromkeys(LISTED, 0)}),
        ("picked", {"layers.*": "gathered"}),
    ],
)
def test_weights_that_may_be_those_of_experts_are_named_with_a_plan(name, plan):
    module = nn.Module()
    module.layers = nn.ModuleList([PLANNED[name][0](), nn.Conv1d(16, 16, 3), PLANNED[name][0]()])
    with pytest.raises(ValueError, match=re.escape(f"`expert_parallel_plan={plan}` distributes")):
        ExpertSplit(module, 2)
    with pytest.raises(ValueError, match=r"none were found that can be\.( `.*)? Experts are modules"):
        ExpertSplit(module, 5)


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        ({"layers.*.bonk": "experts"}, "matches no module; did you mean"),
        ({"layers.*.bank": "experts", "bank.up": 3}, "dim 3 of `layers.0.bank.up` counts experts, but it has 3 dims"),
        ({"bank.up": 1}, "says of no module around it that it is 'experts' or 'gathered'"),
        ({"layers.*.bank": "experts", "bank": "whole"}, "gives `layers.0.bank` 'experts' and 'whole'"),
    ],
)
def test_a_plan_that_does_not_fit_the_module_is_refused(plan, wanted):
    with pytest.raises(ValueError, match=re.escape(wanted)):
        ExpertPlan.of(plan, Net())


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({**E2, "expert_parallel_plan": {}}, "`expert_parallel_plan={}` must be 'auto' or a non-empty dict"),
        ({**E2, "expert_parallel_plan": {"a": "split"}}, "`expert_parallel_plan={'a': 'split'}`"),
        ({**E2, "expert_parallel_plan": {"a": True}}, "`expert_parallel_plan={'a': True}`"),
        ({"expert_parallel_plan": {"a": "whole"}}, "distribute them by `expert_parallel_size`"),
        ({**E2, "expert_parallel_plan": {"a": "gathered"}, "weight_sharding": True}, "`weight_sharding=False`"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused_at_once(arguments, wanted):
    with pytest.raises(ValueError, match=re.escape(wanted)):
        MegatronStrategy(**arguments)


REFUSED: list[Any] = [
    ("planned_turns", {}, "none were found that can be"),
    ("planned_adapted", {}, "has its weights replaced while it is called"),
    ("planned_soft", {}, "`expert_parallel_plan`"),
    ("planned_soft", {"*.mixture": "experts"}, "`layers.0.mixture` is a group of experts, but it is neither"),
    ("planned_soft", {"*.mixture": "gathered", "*.gate.bias": 0, "*.up": 1, "*.gate": "whole"}, "name one of them"),
    ("planned_listed", {"*.mixture": "gathered"}, "it has no parameter with three or more dims"),
    ("words", {"layers.0.experts": "whole", "layers.*": "gathered"}, "names `layers.0.experts`, which lies in"),
]


@pytest.mark.wide
@pytest.mark.parametrize(("name", "plan", "wanted"), REFUSED, ids=str)
def test_what_a_plan_says_wrongly_is_refused_on_every_rank(name, plan, wanted):
    given = {**E2, "expert_parallel_plan": plan or "auto"}
    for outcome in run_trainers(fit, name, given, {}, devices=2, check=False, grace=20.0):
        assert wanted in str(outcome.error), outcome
