"""Weights that are spread over replicas, of a module built on the meta device: no rank has more than its shard of them
before the first step, and the numbers are those of one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_megatron import MegatronStrategy
from lightning_megatron.data_parallel.windows import freeing
from tests.experts.expert_scenarios import fit
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.scenario import differences
from tests.parity.train import make_trainer
from tests.strategy.optimizer_scenarios import Sizes, Task, loader, trained

wide = pytest.mark.wide
SPREAD: dict[str, Any] = {"weight_sharding": True}
ROWS: list[tuple[str, Sizes, dict[str, Any]]] = [
    ("Task", (1, 2, 1), SPREAD),
    ("Tied", (2, 2, 1), {**SPREAD, "pipeline_schedule": "zb-v"}),
    ("ByNorm", (1, 2, 2), SPREAD),
    ("Task", (1, 4, 1), {"weight_sharding": {"shard": 2}}),
    ("Task", (2, 2, 1), SPREAD),
    ("Tied", (1, 2, 1), SPREAD),
    ("Frozen", (1, 2, 1), SPREAD),
    ("FrozenThere", (1, 2, 1), SPREAD),
    ("Fused", (1, 2, 1), SPREAD),
    ("OnOneRank", (1, 2, 1), SPREAD),
    ("StartsWhole", (2, 2, 1), SPREAD),
    ("Task", (1, 2, 2), {**SPREAD, "optimizer_offload": True}),
    ("Frozen", (1, 2, 1), {"weight_sharding": {"sum": "micro_batch"}, "micro_batch_size": 2}),
]


@pytest.mark.everyday(3)
@pytest.mark.parametrize(("kind", "sizes", "options"), ROWS, ids=str)
def test_a_model_that_is_never_whole_trains_as_in_one_process(kind: str, sizes: Sizes, options: dict[str, Any]) -> None:
    devices = sizes[0] * sizes[1] * sizes[2]
    outcomes = run_trainers(trained, kind, sizes, options, 3, None, None, True, devices=devices)
    assert not list(differences("", outcomes[0].value, one_process(trained, kind), 1e-9))


@pytest.mark.parametrize(
    ("kind", "sizes", "options"),
    [
        ("Task", (1, 2, 1), SPREAD),
        pytest.param("LoadsWhole", (1, 2, 1), SPREAD, marks=wide),
        pytest.param("Task", (2, 2, 1), SPREAD, marks=wide),
        pytest.param("Task", (1, 2, 2), {**SPREAD, "optimizer_offload": True}, marks=wide),
    ],
    ids=str,
)
def test_a_run_goes_on_from_a_checkpoint_shard_by_shard(
    kind: str, sizes: Sizes, options: dict[str, Any], tmp_path: Path
) -> None:
    alone, ours = str(tmp_path / "alone.ckpt"), str(tmp_path / "ours")
    run_trainers(trained, kind, None, None, 3, None, alone, devices=1)
    expected = run_trainers(trained, kind, None, None, 6, alone, devices=1)[0].value
    run_trainers(trained, "Task", (1, 2, 1), SPREAD, 3, None, ours, True, devices=2)
    devices = sizes[0] * sizes[1] * sizes[2]
    outcomes = run_trainers(trained, kind, sizes, options, 6, ours, None, True, devices=devices)
    assert not list(differences("", outcomes[0].value, expected, 1e-9))


@pytest.mark.parametrize("kind", ["Task", pytest.param("ByNorm", marks=wide)])
def test_initial_weights_are_read_into_shards(kind: str, tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    run_trainers(trained, "Task", (1, 2, 1), SPREAD, 3, None, first, True, devices=2)
    given = {**SPREAD, "initial_weights": first}
    spread = run_trainers(trained, kind, (1, 2, 1), given, 3, None, second, True, devices=2)[0].value
    whole = run_trainers(trained, kind, (1, 2, 1), {"initial_weights": first}, devices=2)[0].value
    assert not list(differences("", spread, whole, 1e-9))


@pytest.mark.parametrize("precision", ["bf16-true", pytest.param("bf16-mixed", marks=wide)])
def test_sixteen_bits_are_rounded_as_those_of_a_module_with_memory(precision: str) -> None:
    found, expected = (
        run_trainers(trained, "Task", (1, 2, 1), SPREAD, 3, None, None, meta, precision, devices=2)[0].value
        for meta in (True, False)
    )
    assert not list(differences("", found, expected, 0.0))


@pytest.mark.wide
@pytest.mark.parametrize("more", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_experts_beside_late_weights_train_as_without(more: dict[str, Any]) -> None:
    shared = {"expert_parallel_size": 2}
    expected = run_trainers(fit, "built_later", shared, {}, devices=2)[0].value
    options = {**shared, **SPREAD, **more, "micro_batch_size": 2 if "pipeline_parallel_size" in more else "auto"}
    found = run_trainers(fit, "built_later", options, {}, devices=4)[0].value
    assert not list(differences("", found["weights"], expected["weights"], 1e-9))


class Wide(Task):
    """Six layers of 35 MiB, which the allocator gives back to the system."""

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2100, 2100) for _ in range(6))})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[:, :1].double().expand(-1, 2100)
        for layer in self.net["layers"]:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Unwritten(nn.Linear):
    """A linear whose constructor leaves its memory as it is; only `reset_parameters` can tell its values."""

    def __init__(self, features: int) -> None:
        nn.Module.__init__(self)
        self.in_features = self.out_features = features
        self.weight, self.bias = nn.Parameter(torch.empty(features, features)), nn.Parameter(torch.empty(features))
        self.register_buffer("scale", torch.empty(1))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.scale.fill_(1.0)  # type: ignore[operator]


class WideUnwritten(Wide):
    """The same of layers that each initialise themselves."""

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = nn.ModuleDict({"layers": nn.ModuleList(Unwritten(2100) for _ in range(6))})


class TrainedUnwritten(Task):
    """Such layers with `features` each."""

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = nn.ModuleDict({"layers": nn.ModuleList(Unwritten(12) for _ in range(4))})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[:, :1].double().expand(-1, 12)
        for layer in self.net["layers"]:
            x = layer(x) * layer.scale
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Peaks(Callback):
    """Notes the most memory that this process has had up to the first step."""

    def __init__(self) -> None:
        self.start = 0.0

    def on_train_start(self, *_: Any) -> None:
        self.start = _mebibytes("VmHWM")


def _mebibytes(key: str) -> float:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def fit_unwritten(info: RankInfo, sizes: Sizes, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Whole weights after three steps."""
    strategy = MegatronStrategy(*sizes, **options)
    trainer = make_trainer(info, strategy, max_steps=3, limit_val_batches=0)
    module = TrainedUnwritten()
    module.validation_step = None  # type: ignore[assignment]
    trainer.fit(module, loader(info.rank // sizes[2] % sizes[1], sizes[1]))
    return {name: value.detach().clone() for name, value in strategy.full_state_dict().items()}


def peak_of_start(info: RankInfo, options: dict[str, Any], kind: type[Wide] = Wide) -> float:
    """MiB that a process takes before the first step."""
    peaks = Peaks()
    strategy = MegatronStrategy(data_parallel_size=info.world_size, **options)
    trainer = make_trainer(info, strategy, max_steps=1, callbacks=[peaks])
    module = kind()
    module.validation_step = None  # type: ignore[assignment]
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = _mebibytes("VmRSS")
    trainer.fit(module, loader(info.rank, info.world_size))
    return peaks.start - before


@wide
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system tells no peak")
@pytest.mark.parametrize("kind", [Wide, WideUnwritten])
def test_a_process_takes_its_shard_and_one_tensor_before_the_first_step(kind: type[Wide]) -> None:
    whole = 6 * 2100 * 2100 * 8 / 2**20
    spread = max(outcome.value for outcome in run_trainers(peak_of_start, SPREAD, kind, devices=2))
    usual = min(outcome.value for outcome in run_trainers(peak_of_start, {}, kind, devices=2))
    assert usual > 0.95 * whole  # memory that an earlier run of the process has left counts for neither
    assert spread < whole / 2 + 2 * whole / 6 + 20  # its shard, a tensor that is drawn, a message; and what else


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 2, 1), {"optimizer_offload": True}),
        pytest.param((2, 2, 1), {"micro_batch_size": 2}, marks=wide),
        pytest.param((1, 2, 2), {"tensor_parallel_plan": {"net.layers.*": "colwise_rep"}}, marks=wide),
    ],
    ids=str,
)
def test_layers_that_initialise_themselves_start_as_without_shards(sizes: Sizes, options: dict[str, Any]) -> None:
    devices = sizes[0] * sizes[1] * sizes[2]
    found = run_trainers(fit_unwritten, sizes, {**SPREAD, **options}, devices=devices)[0].value
    expected = run_trainers(fit_unwritten, (1, 1, 1), {}, devices=1)[0].value
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-9), name


def left_spread(info: RankInfo, saved: str) -> tuple[bool, str]:
    """Whether weights read as NaN after a fit on replicas without room for whole ones, which save a checkpoint."""
    strategy = MegatronStrategy(data_parallel_size=info.world_size, **SPREAD)
    trainer = make_trainer(info, strategy, max_steps=3, limit_val_batches=0)
    module = Task(meta=True)
    with mock.patch.object(freeing, "_free_now", lambda windows: 0 if info.rank else 1 << 40):
        trainer.fit(module, loader(info.rank, info.world_size), loader(info.rank, info.world_size))
    trainer.save_checkpoint(saved)
    return bool(module.net.layers[0].up.weight.isnan().all()), ""


def test_weights_stay_spread_after_a_fit_where_whole_ones_have_no_room(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    outcomes = run_trainers(left_spread, saved, devices=2)
    assert all(outcome.value[0] for outcome in outcomes)
    assert "stay spread over the replicas" in outcomes[0].output
    alone = str(tmp_path / "alone.ckpt")
    run_trainers(trained, "Task", None, None, 3, None, alone, devices=1)
    expected = run_trainers(trained, "Task", None, None, 6, alone, devices=1)[0].value
    found = run_trainers(trained, "Task", (1, 2, 1), {}, 6, saved, devices=2)[0].value
    assert not list(differences("", found, expected, 1e-9))
