"""Weights sharded over replicas and state in host memory: bytes and seconds of the formulas and of published runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_megatron.planner import Cluster, Limits, ModelShape, Recipe, plan, predict
from lightning_megatron.planner.cost.host_activations import settled
from lightning_megatron.planner.cost.host_update import best_stride, host_bytes, interleaved_seconds, update_seconds
from lightning_megatron.planner.cost.memory import stage_parameters, state_bytes
from lightning_megatron.planner.cost.sharded_state import step_volume
from lightning_megatron.planner.model.software import LIGHTNING, MEGATRON_CORE, PYTORCH_FSDP
from lightning_megatron.planner.runs.runs import read_rows, run_from_row
from lightning_megatron.planner.runs.scoring import score_row
from lightning_megatron.planner.search.savings import variants
from lightning_megatron.strategy.options.options import Options
from lightning_megatron.strategy.options.recipes import arguments_of

DATA = Path(__file__).parents[1] / "data"
A100, H100 = Cluster.named("A100-80"), Cluster.named("H100")
SHAPE = ModelShape(layers=16, hidden=1024, heads=16, vocab=32000, seq=1024, tied=False)
LLAMA_70B = ModelShape(80, 8192, 64, 128256, 8192, 8, 28672, gated=True, tied=False)


def _sharded(free: str, gradient_sum: str, **sizes: int) -> Recipe:
    sizes = {"data": 8, "pipeline": 2, "global_batch": 32} | sizes
    software = replace(LIGHTNING, keeps_16_bit_shard=False)
    return Recipe(**sizes, sharding="fsdp", free=free, gradient_sum=gradient_sum, software=software)


@pytest.mark.parametrize(
    ("free", "gradient_sum", "per_parameter", "per_layer"),
    [("layer", "micro_batch", 16 / 8, 4), ("step", "micro_batch", 16 / 8 + 2, 0), ("step", "step", 12 / 8 + 6, 0)],
)
def test_bytes_are_those_of_the_three_cases(free: str, gradient_sum: str, per_parameter: float, per_layer: int) -> None:
    """16 P/d + 2 e u; 16 P/d + e P; 12 P/d + (e + 4) P, which is what the optimizer alone sharded takes."""
    recipe = _sharded(free, gradient_sum)
    count = stage_parameters(SHAPE, recipe, 1)
    vocabulary = 2 * SHAPE.vocab * SHAPE.hidden if per_layer else 0
    expected = per_parameter * count + per_layer * SHAPE.layer_parameters + vocabulary
    assert sum(state_bytes(SHAPE, recipe, 1, 8)) == pytest.approx(expected, rel=1e-12)
    if gradient_sum == "step":
        zero1 = replace(recipe, sharding="zero1", free="auto", gradient_sum="auto")
        assert sum(state_bytes(SHAPE, zero1, 1, 8)) == pytest.approx(expected, rel=1e-12)


def test_this_packages_shards_are_what_its_page_says() -> None:
    """Weights e P/d between steps and two layers in them, gradients and state as with the optimizer sharded."""
    recipe = Recipe(data=8, pipeline=2, global_batch=32, sharding="fsdp")
    count, vocabulary = stage_parameters(SHAPE, recipe, 1), SHAPE.vocab * SHAPE.hidden
    weights, gradients, optimizer = state_bytes(SHAPE, recipe, 1, 8)
    assert weights == 2 * count / 8 + 2 * (2 * SHAPE.layer_parameters + vocabulary)
    assert (gradients, optimizer) == state_bytes(SHAPE, replace(recipe, sharding="zero1"), 1, 8)[1:]


@pytest.mark.parametrize(
    ("free", "gradient_sum", "gathered", "summed"),
    [("layer", "micro_batch", 4.0, 2.0), ("step", "micro_batch", 0.5, 2.0), ("step", "step", 0.5, 0.5)],
)
def test_messages_are_those_that_were_counted(free: str, gradient_sum: str, gathered: float, summed: float) -> None:
    """In weights, for 4 micro-batches and 2 replicas: what prototypes of this gathered and summed."""
    recipe = _sharded(free, gradient_sum, data=2, global_batch=8)
    found = step_volume(recipe, 1e6, 8)
    assert (found.gathered / 2e6, found.summed / 4e6) == (gathered, summed)


def test_a_layer_that_waits_for_its_weights_takes_longer() -> None:
    slow = replace(A100, network=5e9)
    ahead = Recipe(data=64, global_batch=256, sharding="fsdp")
    waits = replace(ahead, software=replace(LIGHTNING, prefetches_weights=False))
    whole = replace(waits, free="step")
    shape = replace(SHAPE, hidden=4096, heads=32, layers=32, seq=4096)
    seconds = [predict(shape, recipe, slow).breakdown.data_communication for recipe in (waits, ahead, whole)]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("row", [row for row in read_rows(DATA / "published_runs.csv") if "azure" in row["id"]])
def test_published_runs_with_sharded_weights_and_state_on_the_host_are_predicted(row: dict[str, str]) -> None:
    """175B to 2T parameters on up to 1024 GPUs; they fit only as activations and optimizer lie in host memory."""
    run = run_from_row(row)
    found = score_row(row, run, predict(run.shape, run.recipe, run.cluster))
    assert found.error is not None and abs(found.error) < 0.10
    assert found.prediction.fits
    on_gpu = replace(run.recipe, optimizer_offload=0.0, activation_offload=None)
    assert predict(run.shape, on_gpu, run.cluster).memory.total > 1.15 * found.prediction.memory.total


@pytest.mark.parametrize("bandwidth", [6e9, 24e9, 55e9, 450e9])
@pytest.mark.parametrize("update", [0.5e9, 1.7e9, 4e9, 8e9])
def test_the_stride_is_the_best_of_all(bandwidth: float, update: float) -> None:
    found = best_stride(update, bandwidth, 12.0, 2.0)
    all_of_them = {k: interleaved_seconds(k, update, bandwidth, 12.0, 2.0) for k in range(1, 17)}
    if found is not None:
        assert all_of_them[found] == min(all_of_them.values())


@pytest.mark.parametrize(
    ("update", "bandwidth", "best"),
    [(4e9, 55e9, 2), (4e9, 6e9, None), (2e9, 12e9, 4), (8e9, 450e9, 1), (0.5e9, 450e9, 1)],
)
def test_the_stride_of_known_speeds(update: float, bandwidth: float, best: int | None) -> None:
    assert best_stride(update, bandwidth, 12.0, 2.0) == best


def test_state_in_host_memory_leaves_the_gpu_and_costs_time() -> None:
    recipe = Recipe(data=8, global_batch=32, optimizer_offload=0.75)
    kept = predict(SHAPE, replace(recipe, optimizer_offload=0.0), A100)
    found = predict(SHAPE, recipe, A100)
    assert found.memory.optimizer == 0.25 * kept.memory.optimizer
    assert found.memory.host == host_bytes(SHAPE.parameters / 8, recipe) > 9 * SHAPE.parameters / 8
    assert found.breakdown.optimizer > kept.breakdown.optimizer
    assert update_seconds(2e9, recipe, A100) < update_seconds(2e9, recipe, replace(A100, host_bandwidth=6e9))


def test_a_host_with_too_little_memory_does_not_fit() -> None:
    recipe = Recipe(data=8, global_batch=32, sharding="fsdp", optimizer_offload=1.0)
    small = replace(A100, host_memory=1e9)
    assert predict(SHAPE, recipe, A100).fits and not predict(SHAPE, recipe, small).fits


@pytest.mark.parametrize(("tokens", "share"), [(32, 0.68), (64, 1.0), (512, 0.97), (1024, 0.41)])
def test_the_share_of_activations_is_the_notes(tokens: int, share: float) -> None:
    """7B parameters over 8 context ranks at 170 TFLOP/s, 24 GB/s and 2 TB a node, as MEMO's authors have them."""
    shape = ModelShape(layers=32, hidden=4096, heads=32, vocab=50257, seq=1024 * tokens)
    flat = {"gemm_ampere": 170 / 312, "attention_ampere": 170 / 312, "tile_waste": 0.0, "k_half": 0.0}
    from lightning_megatron.planner import DEFAULT_CONSTANTS

    constants = DEFAULT_CONSTANTS.with_values(**flat, attention_ramp=0.0, memory=1e9, launch=0.0)
    recipe = Recipe(context=8, global_batch=1, activation_offload="auto", software=MEGATRON_CORE)
    found = settled(shape, recipe, replace(A100, host_memory=2e12), constants)
    assert found.activation_offload == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("shard", ["dist-opt(zero1)", "zero1", "ZeRO-1"])
@pytest.mark.parametrize(
    "name", ["dgxc-llama31-70b-fp8-512", "dgxc-llama31-405b-fp8-512", "dgxc-llama31-405b-fp8-2048"]
)
def test_runs_in_8_bits_that_took_place_fit(name: str, shard: str) -> None:
    """8-bit products came from Transformer Engine, whatever a row calls its sharding."""
    row = next(row for row in read_rows(DATA / "published_runs.csv") if row["id"] == name)
    run = run_from_row(row | {"shard": shard})
    assert run.recipe.software == MEGATRON_CORE
    assert predict(run.shape, run.recipe, run.cluster).fits


def test_a_search_shards_weights_and_uses_the_host_only_where_needed() -> None:
    limits = Limits(shardings=("zero1", "fsdp"), schedules=("1f1b",), precision="bf16", tensor=1, pipeline=1)
    shape = replace(LLAMA_70B, layers=64)
    with pytest.raises(ValueError, match="fits on `gpus=8` A100-80"):
        plan(shape, A100, 8, 8, limits=limits)
    found = plan(shape, A100, 8, 8, limits=replace(limits, offload=True))
    assert found.best.recipe.sharding == "fsdp" and found.best.recipe.optimizer_offload
    assert arguments_of(found.best.recipe)["optimizer_offload"] == {"keep": 0.0}
    assert found.best.memory.host > 0 and found.best.fits
    easy = plan(SHAPE, A100, 8, 64, limits=replace(limits, offload=True))
    assert easy.best.recipe.optimizer_offload == 0 and easy.best.recipe.activation_offload is None


def test_the_strategy_runs_what_was_chosen_or_says_what_it_lacks() -> None:
    arguments = arguments_of(Recipe(data=8, global_batch=8, sharding="fsdp", optimizer_offload=1.0))
    assert arguments["weight_sharding"] is True and arguments["optimizer_offload"] == {"keep": 0.0}
    said = Recipe(data=8, global_batch=8, sharding="fsdp", free="step", gradient_sum="micro_batch")
    assert arguments_of(said)["weight_sharding"] == {"free": "step", "sum": "micro_batch"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"free": "never"}, "`free=never` is not one of auto, layer, step"),
        ({"sharding": "fsdp", "gradient_sum": "week"}, "`gradient_sum=week` is not one of"),
        ({"free": "step"}, "`sharding=zero1` shards none; leave them out, or use `sharding=fsdp`"),
        ({"optimizer_offload": 1.5}, "`optimizer_offload=1.5` must be a share"),
        ({"optimizer_offload": True}, "`optimizer_offload=True` must be a share"),
        ({"activation_offload": "all"}, "`activation_offload=all` is not one of auto, inputs"),
        ({"activation_offload": -0.1}, "`activation_offload=-0.1` must be a share"),
        ({"activation_offload": "inputs"}, "goes with `recompute=full`, not with `none`"),
        ({"activation_offload": 0.5, "recompute": "full"}, "goes with `recompute=none`, not with `full`"),
        (
            {"activation_offload": 0.5, "software": replace(PYTORCH_FSDP, fused_attention=False)},
            "keeps the output of fused attention, and `pytorch-fsdp` has none",
        ),
    ],
)
def test_impossible_savings_say_what_to_change(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**{"data": 4, "global_batch": 4, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["host_memory", "host_bandwidth", "host_update"])
def test_a_host_is_described_in_datasheet_units(name: str) -> None:
    assert (
        getattr(Cluster.from_mapping({"gpu": "A100", name: 2}), name)
        == 2
        * {
            "host_memory": 2**30,
            "host_bandwidth": 1e9,
            "host_update": 1,
        }[name]
    )
    with pytest.raises(ValueError, match=f"`{name}=0"):
        Cluster.from_mapping({"gpu": "A100", name: 0})


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("sequence", [True, False])
def test_a_search_sends_activations_to_the_host_as_the_strategy_can(schedule: str, sequence: bool) -> None:
    """Some tokens are computed again only where a backward is one piece and tokens are whole."""
    recipe = Recipe(tensor=2, pipeline=2, schedule=schedule, sequence_parallel=sequence, global_batch=4)
    tries = list(variants(recipe, offload=True))
    shares = {tried.activation_offload for tried in tries} - {None}
    assert shares == ({"auto"} if schedule == "1f1b" and not sequence else {1.0})
    for tried in tries:
        Options(**arguments_of(predict(SHAPE, tried, A100).recipe))


def test_shards_over_some_replicas_are_counted_as_such() -> None:
    plain = Recipe(data=8, global_batch=64)
    state = [state_bytes(SHAPE, replace(plain, shard=n), 0, 8) for n in (2, 8)]
    count = stage_parameters(SHAPE, plain, 0)
    assert state[0][2] == 12 * count / 2 and state[1] == state_bytes(SHAPE, plain, 0, 8)
    nodes = Recipe(data=16, global_batch=64, sharding="hsdp")
    assert predict(SHAPE, nodes, A100).recipe.shard == 8
    said = replace(nodes, sharding="fsdp", shard=8)
    assert predict(SHAPE, said, A100).breakdown == predict(SHAPE, nodes, A100).breakdown
    assert arguments_of(predict(SHAPE, nodes, A100).recipe)["weight_sharding"] == {"shard": 8}
    with pytest.raises(ValueError, match="`shard=3` does not divide data x context = 8 replicas"):
        replace(plain, shard=3)
    with pytest.raises(ValueError, match="share nothing with `sharding=none`"):
        replace(plain, shard=2, sharding="none")


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *((f"titan-8b-{run}", 0.04) for run in ("8-fsdp", "8-fsdp-compile", "8-fsdp-compile-fp8", "128-fsdp")),
        ("titan-405b-512-3d-int-fp8", 0.03),
        ("titan-405b-512-3d-1f1b-fp8", 0.17),
        ("titan-70b-256-2d-fp8", 0.24),
    ],
)
def test_torchtitans_memory_is_predicted(name: str, most: float) -> None:
    row = next(row for row in read_rows(DATA / "published_runs.csv") if row["id"] == name)
    run = run_from_row(row)
    found = predict(run.shape, run.recipe, run.cluster).memory.total / 2**30
    assert found == pytest.approx(float(row["mem_gb"]), rel=most)
