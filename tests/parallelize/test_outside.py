"""What leaves a split region another way than through its sum is gathered or refused, never wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_megatron.parallelize import explain, parallelize
from tests.harness import run_ranks
from tests.harness.twins import (
    EXACT,
    assert_same_gradients,
    random_tensor,
    reduce_partial_gradients,
    tensor_group,
)
from tests.parallelize.models import Block, CausalSelfAttention
from tests.parallelize.models_leaky import (
    LEAKY,
    WIDTH,
    Autoencoder,
    CentredGradient,
    Conditions,
    Convolving,
    Exits,
    Flattening,
    Flow,
    GatedByInput,
    MeanOfTokens,
    MixedByTable,
    Penalised,
    ScaledAttention,
    Stack,
    Tables,
    TrainingNorm,
    WritesResidual,
)
from tests.parallelize.models_own import Lent, Masked

REASONS = {
    ScaledAttention: "acts inside it and outside",
    TrainingNorm: "in training",
    CentredGradient: "in training",
}


def notes(module: nn.Module, **options) -> str:
    return " ".join(row.note for row in explain(module, 2, **options).rows)


@pytest.mark.parametrize("kind", LEAKY)
def test_plan_says_what_is_gathered_because_something_else_reads_it(kind):
    assert REASONS.get(kind, "computes something else from the output of 'enc'") in notes(kind().double())


def test_pair_with_dropout_that_nothing_else_reads_stays_split():
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 8)).double()
    assert "gathered" not in notes(module)


def test_explicit_plan_for_an_output_that_is_returned_is_refused():
    with pytest.raises(ValueError, match=r"computes something else from the output of 'enc'.*'colwise_gather_output'"):
        explain(Autoencoder(), 2, {"enc": "colwise", "dec": "rowwise"})


def test_weights_that_are_used_without_calling_their_layers_are_not_split():
    with pytest.raises(ValueError, match=r"weights of 'block\.attn\.c_attn'.* are used without calling the layers"):
        explain(Penalised(), 2)
    plan = {"mlp.0": "colwise", "mlp.2": "rowwise"}
    with pytest.raises(ValueError, match=r"'block\.mlp\.0' cannot be 'colwise': a parameter of it is used by code"):
        explain(Penalised(), 2, plan)


def test_an_embedding_stays_whole_whose_weight_is_that_of_a_layer_in_no_run():
    split = {row.name for row in explain(Masked(), 2).rows}
    assert "body.layers.0.attn.qkv" in split
    assert not split & {"body.embed", "decoder"}


def test_layers_that_need_what_an_earlier_one_gives_stay_whole_where_layers_run_alone():
    module = nn.ModuleDict({"layers": nn.ModuleList([Lent(makes=number % 2 == 0) for number in range(4)])})
    assert {row.name.split(".")[1] for row in explain(module, 2).rows} == {"0", "2"}


def test_layer_whose_input_is_read_inside_its_region_is_not_split():
    with pytest.raises(ValueError, match="no column/row pair"):
        explain(GatedByInput(), 2)


def test_gradients_are_summed_only_where_heads_are_local_or_the_sequence_is_split():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.inner, self.down = (
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, WIDTH),
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, WIDTH),
            )

        def forward(self, x):
            return self.down(self.inner(self.up(self.norm(x))))

    plan = {"norm": "sequence_parallel", "inner": "replicated_with_grad_allreduce"}
    plan |= {"up": "colwise_gather_output", "down": "rowwise_split_input"}
    assert explain(Normed(), 2, plan).partial_gradients == []


REFUSED_WITH_SHARDS = {
    "shared": (lambda: Stack(lambda: ScaledAttention()), r"'layers\.0\.shared\.scale' acts on a part of the tokens"),
    "flattened": (lambda: Stack(Flattening), r"tokens are flattened between 'layers\.0\.up', which reads 3 dims"),
    "convolution before a region": (
        lambda: Stack(Convolving),
        r"mixes tokens outside what the plan splits \(what 'layers\.0\.up' is given deviates\)",
    ),
    "table that mixes tokens": (MixedByTable, r"'layers\.0\.mix' mixes tokens, is not split, and is given something"),
    "condition used after the layers": (lambda: Conditions(after=True), r"'scale' acts on a part of the tokens"),
}


@pytest.mark.parametrize("case", REFUSED_WITH_SHARDS)
def test_what_would_be_wrong_on_sequence_shards_is_refused(case):
    build, said = REFUSED_WITH_SHARDS[case]
    with pytest.raises(ValueError, match=said):
        explain(build().double(), 2, sequence_parallel=True)


def test_a_layer_that_is_split_by_itself_is_refused_or_left_whole_on_sequence_shards():
    plan = {"layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise", "layers.*.exit": "colwise_gather_output"}
    with pytest.raises(ValueError, match=r"the plan splits 'layers\.0\.exit' \(colwise_gather_output\) by itself"):
        explain(Exits(by_layers=True), 2, plan, sequence_parallel=True)
    report = explain(Exits(by_layers=True), 2, sequence_parallel=True)
    assert report.parameters["layers.0.exit.weight"].replicated and "layers.0.exit.weight" in report.partial_gradients


@pytest.mark.parametrize("kind", [Conditions, Tables])
@run_ranks(tensor=2)
def test_parameters_that_reach_sequence_shards_beside_the_hidden_state_have_whole_gradients(mesh, kind):
    torch.manual_seed(0)
    module = kind().double()
    whole = copy.deepcopy(module)
    report = parallelize(module, mesh, sequence_parallel=True)
    ids = torch.arange(24).view(2, 12)
    for model in (module, whole):
        model(ids).square().mean().backward()
    reduce_partial_gradients(module, report.parameters, tensor_group(mesh))
    assert_same_gradients(module, report.parameters, whole)


WHOLE_BETWEEN = {
    "residual around the layers": lambda: Stack(lambda: Block(WIDTH, 4, CausalSelfAttention), around=True),
    "mean over tokens": lambda: Conditions(mean=True),
    "mean of what layers gave": MeanOfTokens,
    "condition used after the layers too": lambda: Conditions(mean=True, after=True),
    "exits": Exits,
    "exits of layers": lambda: Exits(by_layers=True),
    "flow": Flow,
    "flow that passes its sum": lambda: Flow(passes=True),
}


@pytest.mark.parametrize("case", WHOLE_BETWEEN)
@run_ranks(tensor=2)
def test_code_that_reads_what_layers_give_sees_all_tokens(mesh, case):
    torch.manual_seed(0)
    module = WHOLE_BETWEEN[case]().double()
    whole = copy.deepcopy(module)
    report = parallelize(module, mesh, sequence_parallel=True)
    assert "each layer gathers its output" in report.explain()
    _compare_outputs_and_gradients(module, whole, report, mesh, lambda model: model(torch.arange(24).view(2, 12)))


@pytest.mark.parametrize("kind", [Stack, Flow])
@run_ranks(tensor=2)
def test_code_that_calls_the_layers_itself_sees_all_tokens(mesh, kind):
    torch.manual_seed(0)
    module = (Stack(lambda: Block(WIDTH, 4, CausalSelfAttention)) if kind is Stack else Flow()).double()
    whole = copy.deepcopy(module)
    report = parallelize(module, mesh, sequence_parallel=True)

    def by_hand(model):
        x, kept = model.embed(torch.arange(24).view(2, 12)), []
        for layer in model.layers:
            x = layer(x) if kind is Stack else layer(x)[0]
            kept.append(x.mean(1))
        return torch.stack(kept)

    _compare_outputs_and_gradients(module, whole, report, mesh, by_hand)


def _compare_outputs_and_gradients(module, whole, report, mesh, run):
    outputs = [run(model) for model in (module, whole)]
    torch.testing.assert_close(*outputs, **EXACT)
    for output in outputs:
        (
            output * torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view_as(output)
        ).square().mean().backward()
    reduce_partial_gradients(module, report.parameters, tensor_group(mesh))
    assert_same_gradients(module, report.parameters, whole)


@run_ranks(tensor=2)
def test_other_code_is_refused_where_gradients_beside_the_layers_are_partial(mesh):
    module = Conditions().double()
    parallelize(module, mesh, sequence_parallel=True)
    with pytest.raises(RuntimeError, match=r"layer `layers\.0` is called by other code than that of `Conditions`"):
        module.layers[0](module.embed(torch.arange(24).view(2, 12)), module.scale)


@pytest.mark.parametrize("samples", [1, 2])
@run_ranks(tensor=2)
def test_what_a_region_gives_on_sequence_shards_may_be_written_into(mesh, samples):
    torch.manual_seed(0)
    module = Stack(WritesResidual).double()
    whole, ids = copy.deepcopy(module), torch.arange(12 * samples).view(samples, 12)
    report = parallelize(module, mesh, sequence_parallel=True)
    for model in (module, whole):
        model(ids).square().mean().backward()
    reduce_partial_gradients(module, report.parameters, tensor_group(mesh))
    assert_same_gradients(module, report.parameters, whole)


@pytest.mark.wide
@pytest.mark.parametrize("kind", LEAKY)
@run_ranks(tensor=2)
def test_results_and_gradients_are_those_of_one_process_whatever_is_read_elsewhere(mesh, kind):
    torch.manual_seed(0)
    module = kind().double().train()
    whole = copy.deepcopy(module)
    report = parallelize(module, mesh)
    x = random_tensor(3, 5, WIDTH)
    for model in (module, whole):
        found = model(x)
        kept = [*(found if isinstance(found, tuple) else (found,)), *getattr(model, "penalty", [])]
        model.seen = torch.cat([value.flatten() for value in kept])
        model.seen.square().sum().backward()
    torch.testing.assert_close(module.seen, whole.seen, **EXACT)
    reduce_partial_gradients(module, report.parameters, tensor_group(mesh))
    assert_same_gradients(module, report.parameters, whole)
