"""A rehearsal says what the launch will do: counted beside real runs, and refusing what they refuse."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from typer.testing import CliRunner

from lightning_megatron import MegatronStrategy
from lightning_megatron.planner import ModelShape, Recipe
from lightning_megatron.planner.cost.memory import Memory
from lightning_megatron.planner.cost.mixture import sent_bytes
from lightning_megatron.tools.commands.cli import app
from lightning_megatron.tools.commands.rehearse import load
from lightning_megatron.tools.rehearsal import Rehearsal, rehearse
from tests.harness import run_trainers
from tests.tools import rehearsal_scenarios
from tests.tools.rehearsal_scenarios import SmallGPT, build, live, planned, with_mlps

GRID = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "micro_batch_size": 2}
INTERLEAVED = {"pipeline_parallel_size": 2, "micro_batch_size": 2, "pipeline_schedule": "interleaved"}
RECOMPUTED = {"pipeline_parallel_size": 2, "micro_batch_size": 1, "activation_recompute": "full"}
REPLICAS = {"micro_batch_size": 4}
ONE_BACKWARD = {"micro_batch_size": 8}
WIDE = pytest.mark.wide


def sent(found: Rehearsal) -> dict[tuple[Any, ...], int]:
    """What happens in the step and the update, as a live run's ledger has it."""
    entries = {}
    for entry in found.communication:
        peer = -1 if entry.peer is None else entry.peer
        entries[entry.phase, entry.operation, entry.ranks, peer, entry.bytes] = entry.count
    return entries


def in_step(entries: dict[tuple[Any, ...], int]) -> dict[tuple[Any, ...], int]:
    """Without the pickled names of logged values, which only the rank that logs knows."""
    return {e: n for e, n in entries.items() if e[0] in ("step", "optimizer") and (e[1] != "broadcast" or e[4] == 512)}


@pytest.mark.wide
@pytest.mark.parametrize("sharding", [pytest.param(True, marks=WIDE), {"shard": 8}])
def test_replicas_send_no_message_per_parameter_or_rank(sharding: Any) -> None:
    counts = set()
    for layers, world in ((4, 16), (8, 16), (4, 1024)):
        strategy = MegatronStrategy(optimizer_sharding=sharding)
        module = SmallGPT(layers=layers)
        found = rehearse(strategy, module, build()[1], world_size=world, gradient_clip_val=1.0)
        sums = [e for e in found.communication if e.phase in ("step", "optimizer") and e.operation != "broadcast"]
        counts.add(tuple(sorted((entry.phase, entry.operation, entry.count) for entry in sums)))
    (messages,) = counts
    assert sum(count for *_, count in messages) <= 10, messages  # of the first steps: two compare weights, two loaders


def check_memory(predicted: Memory, real: dict[str, int], tensors: int) -> None:
    """The planner's bytes are the real ones; a counter of steps per tensor is not worth a prediction."""
    for kind in ("weights", "gradients", "optimizer"):
        assert 0 <= real[kind] - getattr(predicted, kind) <= 4 * tensors, kind
    assert predicted.activations == pytest.approx(real["activations"], rel=0.1)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("settings", "ranks"),
    [(GRID, 4), pytest.param(INTERLEAVED, 4, marks=WIDE), (RECOMPUTED, 2), (REPLICAS, 2), (ONE_BACKWARD, 2)],
    ids=["tensor x pipeline", "interleaved x data", "recomputed", "replicas", "one backward"],
)  # fmt: skip
def test_a_rehearsal_and_the_planner_say_what_a_real_run_holds_and_sends(settings: dict[str, Any], ranks: int) -> None:
    for outcome in run_trainers(live, settings, devices=ranks):
        found, real = rehearse(MegatronStrategy(**settings), build, world_size=ranks, rank=outcome.rank), outcome.value
        assert found.parameters == real["parameters"]
        for kind in ("weights", "gradients", "optimizer"):
            assert found.bytes_by_kind[kind] == real["bytes"][kind] > 0, kind
        # A real send may still be under way when a backward begins, and keeps its tensor; so may small messages.
        sends = sum(entry.bytes * entry.count for entry in found.communication if entry.operation == "send")
        assert -64 <= real["bytes"]["activations"] - found.bytes_by_kind["activations"] <= sends + 4096
        assert found.instructions == real["instructions"]
        assert in_step(sent(found)) == in_step(real["communication"])
        stage = found.layout.coordinates(outcome.rank).pipeline
        activations = found.bytes_by_kind["activations"]  # of the real run, but for such sends
        check_memory(planned(settings, ranks, stage), real["bytes"] | {"activations": activations}, real["tensors"])
    assert not dist.is_initialized()


CONTEXT = {"pipeline_parallel_size": 2, "context_parallel_size": 2, "micro_batch_size": 4}
SEQUENCE = {"tensor_parallel_size": 2, "sequence_parallel": True, "loss_chunks": 2}
TWOS = {"micro_batch_size": 2}
THIRDS = {"context_parallel_size": 3, "pipeline_schedule": "zb-v", "loss_chunks": "auto"}
OTHERS = [
    pytest.param({"micro_batch_size": 8, "loss_chunks": 4}, 1, build, id="loss in chunks"),
    pytest.param(CONTEXT, 4, build, id="stages x context ranks"),
    pytest.param({"micro_batch_size": 4, "mlp_chunks": 4}, 1, with_mlps, id="MLPs in chunks"),
    *(
        pytest.param(*row, id=name, marks=pytest.mark.wide)
        for name, row in {
            "of split logits": ({"tensor_parallel_size": 2, "micro_batch_size": 4, "loss_chunks": 3}, 2, build),
            "of context ranks": ({"context_parallel_size": 2, "micro_batch_size": 4, "loss_chunks": 3}, 2, build),
            "of stages": ({"pipeline_parallel_size": 2, "micro_batch_size": 4, "loss_chunks": 4}, 2, build),
            "ring": (CONTEXT | {"context_parallel_options": {"method": "ring"}}, 4, build),
            "interleaved": (CONTEXT | TWOS | {"pipeline_schedule": "interleaved", "loss_chunks": 4}, 4, build),
            "zero bubble": ({"pipeline_parallel_size": 2} | TWOS | {"pipeline_schedule": "zb-h1"}, 2, build),
            "zero bubble x context": (CONTEXT | TWOS | {"pipeline_schedule": "zb-h1"}, 4, build),
            "MLPs on stages": (CONTEXT | {"mlp_chunks": 4}, 4, with_mlps),
            "sequence parallel": (CONTEXT | SEQUENCE, 8, build),
            "other numbers of tokens": (CONTEXT | TWOS | THIRDS, 6, build),
        }.items()
    ),
]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("settings", "ranks", "made"), OTHERS)
def test_split_tokens_and_chunks_hold_and_send_what_they_do_in_a_real_run(
    settings: dict[str, Any], ranks: int, made: Any
) -> None:
    for outcome in run_trainers(live, settings, made, devices=ranks):
        found, real = rehearse(MegatronStrategy(**settings), made, world_size=ranks, rank=outcome.rank), outcome.value
        assert found.parameters == real["parameters"]
        for kind in ("weights", "gradients", "optimizer"):
            assert found.bytes_by_kind[kind] == real["bytes"][kind] > 0, kind
        # In a real run a message of up to a few hundred bytes may still be under way when a backward begins.
        assert -64 <= real["bytes"]["activations"] - found.bytes_by_kind["activations"] <= 4096
        assert found.instructions == real["instructions"]
        assert in_step(sent(found)) == in_step(real["communication"])


OFFLOADED = {
    "all": ({"activation_offload": "all"}, 1, None),
    "some layers": ({"activation_offload": ["*.1", "*.2"]} | INTERLEAVED, 2, None),
    "some tokens": ({"activation_offload": {"tokens": 0.4}} | GRID, 4, None),
    "of some layers": ({"activation_offload": {"tokens": 0.3, "layers": ["*.1"]}}, 1, None),
    "no tokens of context ranks": ({"activation_offload": {"tokens": 0}, "context_parallel_size": 2}, 2, None),
    "ring": (
        {"activation_offload": {"tokens": 0.5}, "context_parallel_options": {"method": "ring"}} | CONTEXT,
        4,
        None,
    ),
    "zero bubble": ({"activation_offload": "all", "pipeline_schedule": "zb-h1", "pipeline_parallel_size": 2}, 2, None),
    "recomputed": ({"activation_offload": "all"} | RECOMPUTED, 2, None),
    "as many as fit": ({"activation_offload": "auto"} | GRID, 4, 3e-3),
    "as many as there are": ({"activation_offload": {"tokens": "auto"}}, 1, None),
}


@pytest.mark.wide
@pytest.mark.parametrize(("settings", "ranks", "gib"), OFFLOADED.values(), ids=OFFLOADED)
def test_activations_in_host_memory_are_told_from_those_on_the_device(
    settings: dict[str, Any], ranks: int, gib: float | None
) -> None:
    settings = {"micro_batch_size": 2} | settings
    for outcome in run_trainers(live, settings, build, gib, devices=ranks):
        strategy, real = MegatronStrategy(**settings), outcome.value
        found = rehearse(strategy, build, world_size=ranks, rank=outcome.rank, host_gib=gib)
        for kind in ("weights", "gradients", "optimizer", "host"):
            assert found.bytes_by_kind[kind] == real["bytes"][kind] > 0, kind
        sends = sum(entry.bytes * entry.count for entry in found.communication if entry.operation == "send")
        assert -64 <= real["bytes"]["activations"] - found.bytes_by_kind["activations"] <= sends + 4096
        assert found.instructions == real["instructions"]
        assert in_step(sent(found)) == in_step(real["communication"])


def test_as_many_tokens_are_kept_as_fit_into_the_memory_of_a_host_that_is_told() -> None:
    """Of four ranks on two nodes, here; and less than the inputs of layers take is refused as in a launch."""

    def kept(gib: float | None, **more: Any) -> Rehearsal:
        strategy = MegatronStrategy(activation_offload="auto", micro_batch_size=8)
        return rehearse(strategy, build, world_size=4, devices_per_node=2, host_gib=gib, **more)

    most = kept(None).bytes_by_kind["host"]
    gib = 2 * 0.7 * most / 0.9 / 2**30
    assert 0.6 * most < kept(gib).bytes_by_kind["host"] < 0.95 * most  # with a layer that is measured, whole
    with pytest.raises(RuntimeError, match=r"the host has .* GiB for this rank of 2: inputs and outputs of attention"):
        kept(gib / 10)
    with pytest.raises(ValueError, match="`host_gib=-1` must be the free memory of a node"):
        kept(-1)


def test_weights_of_a_schedule_that_puts_off_their_gradients_keep_its_inputs() -> None:
    """A rehearsal of zero bubble holds what the products of weights wait for: more than 1F1B in the same order."""
    kept = {
        schedule: rehearse(
            MegatronStrategy(pipeline_parallel_size=2, micro_batch_size=2, pipeline_schedule=schedule), build,
            world_size=2, rank=0,
        ).bytes_by_kind["activations"]
        for schedule in ("1f1b", "zb-h1")
    }  # fmt: skip
    assert kept["zb-h1"] > kept["1f1b"]


@pytest.mark.everyday(1)
@pytest.mark.parametrize("more", [{}, {"free": "step", "sum": "micro_batch"}])
def test_weights_shared_out_over_replicas_are_rehearsed(more: dict[str, str]) -> None:
    """Of P weights a rank keeps P/4, and parts too small to cut; a step gathers all of them at least once."""
    plain, found = (
        rehearse(MegatronStrategy(micro_batch_size=4, weight_sharding=sharding), build, world_size=4, rank=1)
        for sharding in (False, more or True)
    )
    whole = plain.bytes_by_kind["weights"]
    small = 2 * 64 * 4 + 32 * 64 * 4  # the last norm, and positions, may stay whole
    assert whole / 4 <= found.bytes_by_kind["weights"] <= whole / 4 + small
    gathers = [entry for entry in found.communication if (entry.phase, entry.operation) == ("step", "all-gather")]
    assert sum(entry.bytes * entry.count for entry in gathers) >= 0.9 * whole


def test_every_parameter_is_on_one_stage_but_tied_ones() -> None:
    strategy = MegatronStrategy(pipeline_parallel_size=4, micro_batch_size=1)
    found = [rehearse(strategy, build, world_size=8, rank=rank) for rank in (0, 2, 4, 6)]
    tied = 256 * 64
    assert sum(one.parameters for one in found) == found[0].whole_parameters + tied
    assert sorted(layer for one in found for layer in one.layers) == [0, 1, 2, 3]


def test_the_strategy_rehearses_itself_and_stays_as_it_was() -> None:
    strategy = MegatronStrategy(pipeline_parallel_size=2, micro_batch_size=4)
    rank_zero_only.rank = 0
    found = strategy.rehearse(build, world_size=16, rank=9)
    assert rank_zero_only.rank == 0  # later messages of this process are shown
    assert str(found.layout.coordinates(found.rank)) == "pipeline 0, data 1, tensor 0"
    assert "activations" in found.describe() and found.as_dict()["world_size"] == 16
    assert strategy.parallel_report is None
    with pytest.raises(RuntimeError, match="the mesh exists only once the Trainer has started"):
        _ = strategy.mesh
    assert torch.zeros(2_000_000).sum().item() == 0  # tensors have memory again


@pytest.mark.parametrize(
    ("settings", "world", "message"),
    [
        (
            {"tensor_parallel_size": 3},
            3,
            "64, not divisible by the tensor-parallel size 3; use `tensor_parallel_size=2 or 4`",
        ),
        ({"pipeline_parallel_size": 8, "micro_batch_size": 1}, 8, "4 layers, fewer than the 8 pipeline stages"),
        ({"pipeline_parallel_size": 2}, 3, "3 devices cannot be divided into replicas of 2 ranks"),
        (
            {"pipeline_parallel_size": 2, "pipeline_split": [1, 2]},
            2,
            "positive layer counts that add up to the 4 layers",
        ),
        ({"pipeline_parallel_size": 2, "activation_recompute": ["*.nothing"]}, 2, "matches no module"),
        ({"optimizer_offload": True}, 1, "counts a device's memory, not its host's; leave `optimizer_offload`"),
        ({"loss_chunks": 0}, 1, "`loss_chunks=0` must be a number of pieces"),
    ],
)
def test_what_a_launch_would_refuse_a_rehearsal_refuses(settings: dict[str, Any], world: int, message: str) -> None:
    with pytest.raises(Exception, match=message):
        rehearse(MegatronStrategy(**settings), build, world_size=world, rank=world - 1)
    assert not dist.is_initialized()


def test_a_rank_outside_of_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="`rank=8` must lie in 0 to 7"):
        rehearse(MegatronStrategy(), SmallGPT(), world_size=8, rank=8)


SCRIPT = """
import torch
from tests.tools.rehearsal_scenarios import build as small

def build():
    return small()

def large():
    from tests.tools import rehearsal_scenarios as scenarios

    scenarios.HIDDEN, scenarios.HEADS, scenarios.VOCABULARY, scenarios.SEQUENCE = 25600, 160, 51200, 2048
    with torch.device("meta"):
        module = scenarios.SmallGPT(layers=128)
    tokens = torch.zeros(512, 2048, dtype=torch.long)
    return module, (tokens, tokens)
"""


def test_the_command_prints_a_report_or_the_error_of_the_launch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    arguments = ["rehearse", f"{script}:build", "--layout", "t2", "p2", "d1", "b2", "--rank", "1", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["coordinates"] == {"tensor": 1, "context": 0, "data": 0, "pipeline": 1}
    failed = CliRunner().invoke(app, ["rehearse", f"{script}:build", "--layout", "t3"])
    assert failed.exit_code == 1 and "not divisible by the tensor-parallel size 3" in failed.output
    assert CliRunner().invoke(app, ["rehearse", f"{script}:nothing"]).exit_code == 1
    wrong = CliRunner().invoke(app, ["rehearse", f"{script}:build", "--layout", "x2"])
    assert wrong.exit_code == 2 and "write sizes as t8 p64 d6" in wrong.output


@pytest.mark.wide
def test_a_trillion_parameters_on_3072_ranks_take_little_time_and_4_gb(tmp_path: Path) -> None:
    """SC21's largest model. The kernel ends the process after three minutes of processor time; it takes one."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    program = (
        "import json, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (180, 180))\n"
        "from lightning_megatron.tools.commands.cli import app\n"
        f"app(['rehearse', {f'{script}:large'!r}, '--layout', 't8', 'p64', 'd6', 'b1', '--rank', '1234', '--json'],"
        " standalone_mode=False)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    memory = int(done.stderr.strip().splitlines()[-1])
    assert found["whole_parameters"] == 1_008_038_758_400 and found["layers"] == [76, 77]
    assert found["parameters"] == 1_966_432_000
    assert memory < 4e9, memory


@pytest.mark.wide
def test_a_wide_model_is_split_as_a_narrow_one_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """At hidden size 8192 no weight that a plan is tried with has numbers."""
    plans, (_, batch) = [], build()
    for hidden in (64, 8192):
        monkeypatch.setattr(rehearsal_scenarios, "HIDDEN", hidden)
        with torch.device("meta"):
            module = SmallGPT()
        found = rehearse(MegatronStrategy(tensor_parallel_size=2), module, batch, rank=0, world_size=2)
        plans.append([line.split()[:2] for line in found.plan.splitlines()[1:]])
    assert plans[0] == plans[1]
    assert ["blocks.*.query", "colwise"] in plans[1] and ["blocks.*.down", "rowwise"] in plans[1]


def test_memory_of_the_process_is_not_that_of_the_model() -> None:
    """Eight layers of hidden size 8192 are 26 GB; a rehearsal of them adds less than one."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def wide() -> Any:
        module = SmallGPT(2)
        module.blocks.append(torch.nn.Sequential(torch.nn.Linear(64, 40_000_000), torch.nn.Linear(40_000_000, 64)))
        return module, build()[1]

    found = rehearse(MegatronStrategy(micro_batch_size=8), wide, world_size=1)
    assert found.bytes_by_kind["weights"] > 20e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1e6


DEEPSEEK = """
import torch
from lightning.pytorch import LightningModule
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

SMALL = dict(vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=1)

class Model(LightningModule):
    def __init__(self, **sizes):
        super().__init__()
        self.model = DeepseekV3ForCausalLM(DeepseekV3Config(use_cache=False, **sizes))

    def training_step(self, batch, index):
        tokens, targets = batch
        return torch.nn.functional.cross_entropy(self.model(tokens).logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

def small():
    tokens = torch.arange(8 * 32).view(8, 32) % 256
    return Model(**SMALL), (tokens, tokens)

def large():
    with torch.device("meta"):
        module = Model()
    tokens = torch.zeros(16, 4096, dtype=torch.long)
    return module, (tokens, tokens)
"""


@pytest.mark.wide
def test_experts_that_ranks_share_out_are_sent_as_many_rows_as_the_planner_says(tmp_path: Path) -> None:
    """Rank 5 has layers 0 and 1, of which the second is a mixture: four exchanges of T k h numbers per micro-batch."""
    script = tmp_path / "deepseek.py"
    script.write_text(DEEPSEEK)
    strategy = MegatronStrategy(pipeline_parallel_size=2, expert_parallel_size=4, micro_batch_size=1)
    found = rehearse(strategy, load(f"{script}:small"), world_size=8, rank=5)
    sent = [entry for entry in found.communication if (entry.operation, entry.phase) == ("all-to-all", "step")]
    rows = {entry.bytes: entry.count for entry in sent if entry.bytes == 32 * 2 * 64 * 4}
    first_look = 2  # the first micro-batch's shapes are looked at before the step
    assert rows == {32 * 2 * 64 * 4: 8 * 4 + first_look}
    assert {entry.ranks for entry in sent} == {(4, 5, 6, 7)}
    shape = ModelShape(4, 64, 4, 256, 32, ffn=128, gated=True, tied=False, experts=8, top_k=2, expert_inner=32)
    recipe = Recipe(pipeline=2, data=4, global_batch=32, expert=4, precision="fp32")
    assert sent_bytes(shape, recipe) * 4 / 3 == 4 * 32 * 2 * 64 * 4
    whole = rehearse(MegatronStrategy(pipeline_parallel_size=2), load(f"{script}:small"), world_size=8, rank=5)
    assert whole.parameters - found.parameters == 3 / 4 * 8 * 3 * 64 * 32


@pytest.mark.wide
def test_deepseek_v3_on_2048_ranks_takes_under_a_minute_and_4_gb(tmp_path: Path) -> None:
    """671 billion parameters, 256 experts over 64 ranks. The kernel ends the process after a minute of its time."""
    script = tmp_path / "deepseek.py"
    script.write_text(DEEPSEEK)
    arguments = ["rehearse", f"{script}:large", "--layout", "p16", "d128", "b1", "--rank", "1234", "--json"]
    program = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (180, 180))\n"
        "from lightning_megatron.tools.commands.cli import app\n"
        f"app({[*arguments, '--strategy', 'expert_parallel_size=64']!r}, standalone_mode=False)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["whole_parameters"] == 671_026_404_352 and found["layers"] == [23, 24, 25, 26]
    # Four mixtures with 4 of 256 experts each, and what is beside them.
    assert found["parameters"] == 1_636_630_528
    assert int(done.stderr.strip().splitlines()[-1]) < 4e9
