"""Time and memory follow the papers' formulas where those exist, and behave like machines where they do not."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_megatron.pipeline.schedule import make_schedule
from lightning_megatron.pipeline.timeline import activations_in_flight
from lightning_megatron.planner import DEFAULT_CONSTANTS, Cluster, ModelShape, Recipe, Software, predict
from lightning_megatron.planner.cost.communication import Group, all_reduce_seconds, bus_bandwidth, gather_seconds
from lightning_megatron.planner.cost.compute import accumulation_seconds, gemm_seconds
from lightning_megatron.planner.cost.layer_memory import layer_activation_bytes
from lightning_megatron.planner.cost.makespan import closed_form, simulated, simulated_in_full
from lightning_megatron.planner.cost.memory import (
    peak_memory,
    recompute_share,
    state_bytes,
)
from lightning_megatron.planner.cost.stage_layers import in_flight, layers_of_ranks, split_layers
from lightning_megatron.planner.cost.stages import StageSeconds
from lightning_megatron.planner.model.software import MEGATRON_2021, MEGATRON_CORE

GPT3 = ModelShape(layers=96, hidden=12288, heads=96, vocab=51200, seq=2048, positions=2048)
A100 = Cluster.named("A100-80")
H100 = Cluster.named("H100")


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("sequence", [False, True])
def test_activations_of_a_layer_are_korthikantis(tensor: int, sequence: bool) -> None:
    common = {"tensor": tensor, "micro_batch": 2, "global_batch": 2}
    recipe = Recipe(**common, precision="fp16", sequence_parallel=sequence, software=MEGATRON_2021)
    s, b, h, a, t = 2048, 2, 12288, 96, tensor
    scores = 5 * a * s / h / t
    expected = s * b * h * ((34 / t if sequence else 10 + 24 / t) + scores)
    assert layer_activation_bytes(GPT3, recipe) == pytest.approx(expected, rel=1e-12)


def test_selective_recomputation_drops_the_scores() -> None:
    recipe = Recipe(tensor=8, precision="fp16", recompute="selective", software=MEGATRON_2021)
    assert layer_activation_bytes(GPT3, recipe) == pytest.approx(34 * 2048 * 12288 / 8, rel=1e-12)


class _Block(nn.Module):
    """A plain pre-norm layer, as users write it. x: [batch, seq, hidden] -> [batch, seq, hidden]."""

    def __init__(self, hidden: int, heads: int, ffn: int, gated: bool) -> None:
        super().__init__()
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.norm, self.norm2 = norm(hidden), norm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)
        self.gate = nn.Linear(hidden, ffn) if gated else None
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        inner = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        return x + self.down(inner)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("gated", [False, True])
def test_activations_of_a_layer_are_what_autograd_really_keeps(precision: str, gated: bool) -> None:
    layers, hidden, heads, batch, seq = 3, 64, 4, 2, 32
    shape = ModelShape(layers=layers, hidden=hidden, heads=heads, vocab=10, seq=seq, ffn=192, gated=gated)
    dtype = {"fp32": torch.float32, "fp64": torch.float64}[precision]
    model = nn.Sequential(*(_Block(hidden, heads, 192, gated) for _ in range(layers))).to(dtype)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(torch.randn(batch, seq, hidden, dtype=dtype))
    counted = sum(storage.nbytes() for storage in kept.values()) / layers
    recipe = Recipe(micro_batch=batch, global_batch=batch, precision=precision)
    assert layer_activation_bytes(shape, recipe) == pytest.approx(counted, rel=0.1)
    assert output.requires_grad


def test_weights_gradients_and_moments_of_every_stage_are_counted_exactly() -> None:
    shape = ModelShape(layers=6, hidden=64, heads=4, vocab=100, seq=16, tied=False)
    recipe = Recipe(pipeline=3, global_batch=3, precision="fp64", sharding="none")
    found = [state_bytes(shape, recipe, stage, 8) for stage in range(3)]
    assert sum(weights for weights, _, _ in found) == 8 * shape.parameters
    assert [gradients for _, gradients, _ in found] == [weights for weights, _, _ in found]
    assert [moments for _, _, moments in found] == [2 * weights for weights, _, _ in found]


@pytest.mark.parametrize(("sharding", "expected"), [("none", 18.0), ("zero1", 6 + 12 / 4), ("zero2", 2 + 16 / 4)])
def test_bytes_per_parameter_of_adam_in_mixed_precision(sharding: str, expected: float) -> None:
    shape = ModelShape(layers=4, hidden=64, heads=4, vocab=100, seq=16)
    recipe = Recipe(data=4, global_batch=8, sharding=sharding, precision="bf16")
    total = sum(state_bytes(shape, recipe, 0, 8))
    assert total == pytest.approx(expected * shape.parameters, rel=1e-12)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize(("stages", "count"), [(4, 40), (4, 8), (4, 3), (4, 9), (2, 6), (3, 7)])
def test_micro_batches_in_flight_are_the_schedules_own(name: str, stages: int, count: int) -> None:
    chunks = 2 if name in ("interleaved", "zb-v", "dualpipe-v") else 1
    recipe = Recipe(pipeline=stages, global_batch=count, chunks=chunks, schedule=name)
    real = activations_in_flight(make_schedule(name, stages, count, chunks=chunks))
    exact = chunks == 1 or (count >= 2 * stages and (name != "interleaved" or count % stages == 0))
    for stage in range(stages):
        over = in_flight(recipe, stage) - real[stage] / chunks
        assert over == 0 if exact else 0 <= over <= 1


def test_layers_are_split_evenly_or_with_the_ends_counted() -> None:
    assert split_layers(8, 4) == [2, 2, 2, 2]
    assert split_layers(62, 32) == [1, *[2] * 30, 1]
    assert split_layers(10, 4) == [2, 3, 3, 2]
    assert split_layers(9, 4) == [3, 2, 2, 2]
    with pytest.raises(ValueError, match="`layers=3` is less than the 8 virtual stages"):
        split_layers(3, 8)


def test_v_schedules_put_both_ends_on_the_first_rank() -> None:
    recipe = Recipe(pipeline=2, chunks=2, schedule="zb-v", global_batch=4)
    assert [recipe.rank_of(stage) for stage in range(4)] == [0, 1, 1, 0]
    shape = ModelShape(layers=6, hidden=64, heads=4, vocab=100, seq=16)
    assert layers_of_ranks(shape, recipe) == [2, 4]


def _costs(recipe: Recipe, uneven: bool) -> list[StageSeconds]:
    scale = [1.0 + (0.2 * (stage % 3) if uneven else 0.0) for stage in range(recipe.virtual_stages)]
    return [StageSeconds(1.0 * x, 1.0 * x, 1.0 * x, 0.0, 0.0, 0.0) for x in scale]


@pytest.mark.parametrize(
    ("schedule", "chunks", "bubble"),
    [("gpipe", 1, 3 * 3), ("1f1b", 1, 3 * 3), ("interleaved", 2, 3 * 3), ("zb-h1", 1, 3 * 1)],
)
def test_even_stages_have_the_papers_bubble_in_both_ways(schedule: str, chunks: int, bubble: float) -> None:
    recipe = Recipe(pipeline=4, global_batch=16, chunks=chunks, schedule=schedule)
    costs = _costs(recipe, uneven=False)
    ideal = 16 * 3 * chunks
    assert closed_form(costs, recipe) == pytest.approx(ideal + bubble)
    assert simulated(costs, recipe) == pytest.approx(ideal + bubble)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"])
def test_long_steps_are_simulated_as_if_in_full(schedule: str) -> None:
    chunks = 2 if schedule in ("interleaved", "zb-v") else 1
    recipe = Recipe(pipeline=4, global_batch=61, chunks=chunks, schedule=schedule)
    costs = _costs(recipe, uneven=True)
    assert simulated(costs, recipe) == pytest.approx(simulated_in_full(costs, recipe, 61), rel=1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-h2"])
def test_closed_forms_rank_layouts_as_the_simulator_does(schedule: str) -> None:
    recipe = Recipe(
        tensor=8, pipeline=8, data=4, chunks=2 if schedule == "interleaved" else 1, schedule=schedule, global_batch=256
    )
    quick = predict(GPT3, recipe, A100, makespan=closed_form).iteration_seconds
    assert quick == pytest.approx(predict(GPT3, recipe, A100).iteration_seconds, rel=0.02)


def test_the_parts_of_a_step_add_up_and_throughput_follows() -> None:
    recipe = Recipe(tensor=8, pipeline=8, data=4, global_batch=512, recompute="full")
    found = predict(GPT3, recipe, A100)
    assert sum(asdict(found.breakdown).values()) == pytest.approx(found.iteration_seconds)
    assert min(asdict(found.breakdown).values()) >= 0
    assert found.tokens_per_second == pytest.approx(512 * 2048 / found.iteration_seconds)
    flops = found.mfu * 312e12 * 256 * found.iteration_seconds
    assert flops == pytest.approx(GPT3.model_flops_per_token * 512 * 2048)
    assert found.hfu / found.mfu == pytest.approx(4 / 3, rel=0.01)


def test_small_products_reach_less_of_the_peak() -> None:
    gpu = A100.gpu
    shares = [
        2 * n**3 / gpu.peak_16 / gemm_seconds(n, n, n, gpu, DEFAULT_CONSTANTS, "bf16") for n in (256, 1024, 4096, 16384)
    ]
    assert shares == sorted(shares)
    assert shares[0] < 0.4 < 0.7 < shares[-1] < DEFAULT_CONSTANTS.gemm_ampere


def test_a_ring_inside_a_node_uses_nvlink_and_between_nodes_the_adapters_of_its_members() -> None:
    exact = DEFAULT_CONSTANTS.with_values(nvlink=1.0, network=1.0, network_decay=0.0)
    assert bus_bandwidth(Group(8), A100, exact) == A100.nvlink
    assert bus_bandwidth(Group(4, stride=8), A100, exact) == A100.network
    assert bus_bandwidth(Group(16, stride=2), A100, exact) == 4 * A100.network
    assert Group(16, stride=2).nodes(8) == 4


def test_a_ring_through_one_adapter_of_each_node_meets_no_congestion() -> None:
    single = [bus_bandwidth(Group(8 * nodes, adapters=1), A100, DEFAULT_CONSTANTS) for nodes in (2, 64)]
    assert single[0] == single[1] == A100.network * DEFAULT_CONSTANTS.network
    every = [bus_bandwidth(Group(nodes, stride=8), A100, DEFAULT_CONSTANTS) for nodes in (2, 64)]
    assert every[0] > every[1]


def test_an_all_reduce_moves_twice_what_an_all_gather_does() -> None:
    size = 1e9
    gather = gather_seconds(size, Group(8), A100, DEFAULT_CONSTANTS)
    assert all_reduce_seconds(size, Group(8), A100, DEFAULT_CONSTANTS) == pytest.approx(2 * gather, rel=1e-3)
    assert gather == pytest.approx(7 / 8 * size / (A100.nvlink * DEFAULT_CONSTANTS.nvlink), rel=0.01)


def test_tensor_parallelism_across_nodes_is_slower_than_inside() -> None:
    inside = predict(GPT3, Recipe(tensor=8, pipeline=8, global_batch=64, recompute="full"), A100)
    across = predict(GPT3, Recipe(tensor=32, pipeline=2, global_batch=64, recompute="full"), A100)
    assert across.breakdown.tensor_communication > 2 * inside.breakdown.tensor_communication


def test_a_faster_network_never_makes_a_step_slower() -> None:
    recipe = Recipe(tensor=8, pipeline=8, data=16, global_batch=512, recompute="full")
    times = [predict(GPT3, recipe, replace(A100, network=speed * 1e9)).iteration_seconds for speed in (5, 12.5, 25, 50)]
    assert times == sorted(times, reverse=True)


def test_recomputation_trades_time_for_memory() -> None:
    none = predict(GPT3, Recipe(tensor=8, pipeline=8, global_batch=64), A100)
    full = predict(GPT3, Recipe(tensor=8, pipeline=8, global_batch=64, recompute="full"), A100)
    assert full.iteration_seconds > 1.2 * none.iteration_seconds
    assert full.memory.activations < 0.5 * none.memory.activations


def test_auto_recomputes_as_few_layers_as_memory_needs() -> None:
    recipe = Recipe(tensor=8, pipeline=8, global_batch=512, micro_batch=8, recompute="auto", data=8)
    share = recompute_share(GPT3, recipe, A100)
    assert 0 < share < 1
    assert peak_memory(GPT3, recipe, A100, share).total <= A100.gpu.memory
    assert peak_memory(GPT3, recipe, A100, share - 0.05).total > A100.gpu.memory


def test_gradients_of_many_micro_batches_are_added_up_where_no_product_does_it() -> None:
    layer = 1e9
    recipe = Recipe(global_batch=8, precision="bf16", software=MEGATRON_2021)
    seconds = accumulation_seconds(layer, recipe, A100.gpu, DEFAULT_CONSTANTS)
    assert seconds == pytest.approx((2 + 2 * 4) * layer / (2039e9 * DEFAULT_CONSTANTS.memory))
    half = replace(recipe, precision="fp16")
    assert accumulation_seconds(layer, half, A100.gpu, DEFAULT_CONSTANTS) == pytest.approx(0.6 * seconds)
    for free in (replace(recipe, software=MEGATRON_CORE), replace(recipe, global_batch=1)):
        assert accumulation_seconds(layer, free, A100.gpu, DEFAULT_CONSTANTS) == 0


def test_a_tied_matrix_of_two_stages_has_one_optimizer_state_in_this_packages_strategy() -> None:
    shape = ModelShape(layers=4, hidden=64, heads=4, vocab=256, seq=16)
    recipe = Recipe(pipeline=2, data=2, global_batch=4)
    states = [state_bytes(shape, recipe, stage, 8)[2] for stage in (0, 1)]
    elsewhere = [state_bytes(shape, replace(recipe, software=Software()), stage, 8)[2] for stage in (0, 1)]
    assert 2 * sum(states) == 12 * shape.parameters
    assert 2 * sum(elsewhere) == 12 * (shape.parameters + 256 * 64)


def test_fully_sharded_weights_are_gathered_once_per_micro_batch() -> None:
    shape = ModelShape(layers=32, hidden=4096, heads=32, vocab=32000, seq=2048, gated=True, ffn=11008)
    slow = replace(A100, network=1e9)
    once, twice = (
        predict(shape, Recipe(data=64, global_batch=64 * m, sharding="fsdp", software=Software()), slow) for m in (1, 2)
    )
    ratio = twice.breakdown.data_communication / once.breakdown.data_communication
    assert ratio == pytest.approx(2, rel=0.01)


def test_eight_bit_products_are_faster_on_hopper_and_refused_on_ampere() -> None:
    recipe = Recipe(tensor=4, pipeline=8, data=4, global_batch=256, software=MEGATRON_CORE)
    eight = replace(recipe, precision="fp8")
    assert predict(GPT3, eight, H100).iteration_seconds < 0.8 * predict(GPT3, recipe, H100).iteration_seconds
    with pytest.raises(ValueError, match="`precision=fp8` is not available on A100-80"):
        predict(GPT3, eight, A100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor": 0}, "`tensor=0` must be at least 1"),
        ({"schedule": "zigzag"}, "`schedule=zigzag` is not one of gpipe, 1f1b"),
        ({"schedule": "1f1b", "chunks": 2}, "use `schedule=interleaved`"),
        ({"schedule": "zb-v"}, "has 2 chunks per rank"),
        ({"data": 8}, "`global_batch=4` is below data x micro_batch = 8 x 1"),
    ],
)
def test_impossible_recipes_say_what_to_change(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**{"pipeline": 2, "global_batch": 4, **change})  # type: ignore[arg-type]


def test_a_cluster_is_described_in_yaml_with_datasheet_units(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "cluster.yaml"
    path.write_text("gpu: {name: Mine, peak_16: 100, memory: 24, bandwidth: 1000}\nnetwork: 12.5\ngpus_per_node: 4\n")
    cluster = Cluster.from_yaml(path)
    assert (cluster.gpu.peak_16, cluster.network, cluster.gpus_per_node) == (100e12, 12.5e9, 4)
    path.write_text("gpu: A100\nnetwork: 6.25\n")
    assert Cluster.from_yaml(path) == replace(A100, network=6.25e9)
    path.write_text("gpu: A100\nwifi: 1\n")
    with pytest.raises(ValueError, match=r"unknown cluster fields \['wifi'\]"):
        Cluster.from_yaml(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu: [", "is not YAML"),
        ("- 1", "not a mapping"),
        ("gpu: 3", "`gpu: 3` must be a known name"),
        ("gpu: A100\nnetwork: fast", "`network: fast` .* must be a positive number"),
        ("gpu: {name: X, peak_16: 0, memory: 24, bandwidth: 1}", "`peak_16=0.0` of GPU X must be positive"),
    ],
)
def test_a_cluster_that_cannot_be_read_says_where(tmp_path, text: str, message: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Cluster.from_yaml(path)


@pytest.mark.parametrize("name", ["A100", "a100-80gb", "NVIDIA A100-SXM4-80GB", "A100_80"])
def test_gpu_names_are_read_as_people_write_them(name: str) -> None:
    assert Cluster.named(name) == A100


def test_an_unknown_gpu_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"`gpu=Z9000` is not in the table \(A100-40, A100-80, B200, H100"):
        Cluster.named("Z9000")
