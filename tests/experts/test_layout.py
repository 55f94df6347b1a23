"""Mixtures of experts in layouts that the planner chooses, and on ranks that it numbers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import MegatronStrategy
from lightning_megatron.mesh.layout import Layout
from lightning_megatron.planner import Cluster, Gpu, ModelShape, Recipe
from lightning_megatron.planner.topology import RankPlacement, rank_numbers, step_volumes
from lightning_megatron.strategy.memory.whole_shape import counted
from lightning_megatron.strategy.tried_layout import refused_choice
from tests.experts.expert_scenarios import TOKENS, Words, built, fit
from tests.experts.families import FAMILIES, FURTHER, IN_FLOAT32, WIDTH
from tests.harness import one_process, run_trainers

CPU = Cluster(Gpu("CPU", "ampere", 1e11, 0.0, 4e9, 1e10, 1), nvlink=2e9, network=1e9)
PLAIN = {"gradient_clip_val": 0.5}
GRID = {"tensor": 2, "pipeline": 2}


def asked(devices: int, **limits: Any) -> dict[str, Any]:
    facts = {"cluster": CPU, "seq": TOKENS, "batch_size": 16 // devices}
    return {"layout": "auto", "layout_options": facts | limits}


PLANNED = [
    ("Mixtral", 2, asked(2), 0.5),
    ("Mixtral", 4, asked(4), 0.25),
    ("Mixtral", 4, asked(4, **GRID), 0.25),
    ("Mixtral", 4, {**asked(4, tensor=2), "expert_parallel_size": 2}, 0.5),
    ("Jamba", 4, asked(4), 0.25),
    ("LongcatFlash", 4, asked(4), 1.0),
]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("name", "devices", "options", "share"), PLANNED, ids=range(len(PLANNED)))
def test_a_planned_layout_shares_out_experts_and_trains_as_one_process(name, devices, options, share):
    expected = one_process(fit, name, None, PLAIN)
    near = 1e-6 if name in (*IN_FLOAT32, "Jamba") else 1e-9
    found = [outcome.value for outcome in run_trainers(fit, name, options, PLAIN, devices=devices)]
    for value in found:
        assert value["share"] == share
        assert value["losses"] == pytest.approx(expected["losses"], rel=near)
    torch.testing.assert_close(found[0]["weights"], expected["weights"], rtol=near, atol=near)


@pytest.mark.wide
@pytest.mark.parametrize("options", [asked(4), {**asked(4, **GRID), "log_expert_load": True}], ids=["free", "grid"])
def test_the_reference_decoder_is_planned_before_it_is_built(options):
    expected = one_process(fit, "reference", None, PLAIN)
    found = [outcome.value for outcome in run_trainers(fit, "reference", options, PLAIN, devices=4)]
    for value in found:
        losses = {name: number for name, number in value["losses"].items() if not name.startswith("expert_load")}
        assert losses == pytest.approx(expected["losses"], rel=1e-9)
    torch.testing.assert_close(found[0]["weights"], expected["weights"], rtol=1e-9, atol=1e-9)


@pytest.mark.wide
@pytest.mark.parametrize("gpus", [(0, 2, 1, 3), (0, 3, 2, 1)], ids=str)
def test_processes_with_experts_are_numbered_by_a_placement(gpus):
    ranks = [(0, data, tensor) for data in range(2) for tensor in range(2)]
    placement = RankPlacement(dict(zip(ranks, gpus, strict=True)), 1.0, {}, ())
    assert rank_numbers(placement, Layout(tensor=2, data=2)) != [0, 1, 2, 3]
    options = {"tensor_parallel_size": 2, "expert_parallel_size": 4, "topology": placement}
    expected = one_process(fit, "Mixtral", None, PLAIN)
    for outcome in run_trainers(fit, "Mixtral", options, PLAIN, devices=4):
        assert outcome.value["losses"] == pytest.approx(expected["losses"], rel=1e-9)


def test_rows_count_on_the_axes_that_they_cross():
    shape = ModelShape(2, 64, 4, 100, 8, ffn=32, gated=True, tied=False, experts=4, top_k=2)
    sizes = {"tensor": 2, "data": 2, "global_batch": 2, "sequence_parallel": False, "precision": "fp32"}
    whole, shared = (step_volumes(shape, Recipe(**sizes, expert=size)) for size in (1, 4))
    rows = 4 * 4 * (8 / 2 * 2 * 64) * 3 / 4 * 2  # bytes of 4 T k h (e-1)/e in both layers
    assert shared.tensor - whole.tensor == pytest.approx(rows / 3)
    experts = 2 * 4 * shape.expert_parameters
    dense = step_volumes(shape, Recipe(**sizes)).data - (4 + 4) * experts / 2 / 2
    assert shared.data == pytest.approx(dense + rows * 2 / 3)  # no other rank has the same experts


COUNTED = [name for name in (*FAMILIES, *FURTHER) if name not in ("NemotronH", "JetMoe", "SwitchTransformers")]


@pytest.mark.parametrize("name", COUNTED)
def test_a_mixture_is_counted_with_its_experts(name):
    module = built(name)
    shape = counted(module, seq=TOKENS)
    assert (shape.experts, shape.top_k, shape.heads) == (4, 2, 2)
    assert shape.parameters == pytest.approx(sum(p.numel() for p in module.parameters()), rel=0.06)


def test_layers_with_different_numbers_of_experts_have_the_parameters_of_all():
    module = built("reference")
    module.configure_model()  # type: ignore[no-untyped-call, operator]
    shape = counted(module, seq=TOKENS)
    assert (shape.layers, shape.moe_layers, shape.experts, shape.expert_inner, shape.heads) == (4, 2, 2, 96, 2)
    rows_of_router = 2 * WIDTH  # the shape has two experts in each layer, the second mixture has four
    assert shape.parameters + rows_of_router == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", ["NemotronH", "JetMoe", "SwitchTransformers", "words"])
def test_mixtures_of_another_structure_are_not_counted(name):
    with pytest.raises(ValueError, match=r"ModelShape|an encoder and a decoder"):
        counted(built(name), seq=TOKENS)


@pytest.mark.parametrize(
    ("name", "recipe", "limit"),
    [
        ("Mixtral", Recipe(data=2, expert=2, global_batch=2), None),
        ("Mixtral", Recipe(tensor=2, expert=2), None),
        ("LongcatFlash", Recipe(data=2, expert=2, global_batch=2), ("expert", 1)),
        ("one_less", Recipe(data=2, expert=2, global_batch=2), ("expert", 1)),
    ],
    ids=["rows", "both", "identities", "indivisible"],
)
def test_a_choice_that_a_module_does_not_allow_is_taken_back(name, recipe, limit):
    refused = refused_choice(MegatronStrategy().options, built(name), recipe)
    assert (None if refused is None else (refused.name, refused.without)) == limit


class Mixing(nn.Module):
    """Adds the mean of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu()) * x.mean(1, keepdim=True)


@pytest.mark.parametrize(("size", "limit"), [(2, ("sequence_parallel", False)), (3, ("tensor", 1))])
def test_layers_are_split_in_the_ways_that_a_trial_allows(size, limit):
    refused = refused_choice(MegatronStrategy().options, Words([Mixing(), Mixing()]), Recipe(tensor=size))
    assert refused is not None and (refused.name, refused.without) == limit


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("Mixtral", {**asked(2), "expert_parallel_size": 8}, "`expert=8` does not share out the model's `experts=4`"),
        ("LongcatFlash", {**asked(2), "expert_parallel_size": 2}, "none were found that can be"),
    ],
)
@pytest.mark.wide
def test_a_number_of_expert_ranks_that_does_not_fit_is_refused_with_the_reason(name, options, wanted):
    for outcome in run_trainers(fit, name, options, PLAIN, devices=2, check=False, grace=20.0):
        assert wanted in str(outcome.error), outcome


def test_experts_that_are_cut_themselves_are_not_planned():
    wanted = "`expert_tensor_parallel_size=2` cannot be combined with `layout='auto'`"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        MegatronStrategy(expert_tensor_parallel_size=2, layout="auto")
