"""Lightning's own doors: hooks that edit checkpoints, loggers that upload, command lines, copies of Trainers."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, cli
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoints.files.importing import import_checkpoint
from lightning_megatron.checkpoints.files.sources import open_source
from lightning_megatron.mesh.layout import Layout
from lightning_megatron.strategy.lightning.trainer_access import refuse_graphs
from lightning_megatron.strategy.saving.state_on_disk import StateOnDisk
from tests.harness import run_trainers
from tests.harness.launched import environment
from tests.strategy.door_scenarios import (
    MLFlow,
    Wandb,
    bytes_of_the_whole_state,
    copied,
    copied_meanwhile,
    edited,
    looked_at,
    met_at_the_start,
    out_of_time,
    refused_to_pickle,
    summarized,
    uploaded,
)
from tests.strategy.prediction_scenarios import logged

WIDE = pytest.mark.wide


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 2), pytest.param((1, 2, 1), marks=WIDE)])
def test_a_hook_renames_drops_and_changes_what_is_loaded(sizes: tuple[int, int, int]) -> None:
    for outcome in run_trainers(edited, sizes, devices=sizes[0] * sizes[1] * sizes[2]):
        assert outcome.value == []


def test_a_hook_computes_with_what_is_loaded() -> None:
    assert run_trainers(looked_at, devices=1)[0].value < 1e-12


@pytest.mark.parametrize("sizes", [(1, 2, 1), pytest.param((2, 1, 1), marks=WIDE), pytest.param((1, 1, 2), marks=WIDE)])
def test_a_saved_whole_state_is_as_large_as_its_weights(sizes: tuple[int, int, int]) -> None:
    written, elements = run_trainers(bytes_of_the_whole_state, sizes, devices=2)[0].value
    assert elements > 10_000 and written < elements + 16_384


@pytest.mark.parametrize("kind", [Wandb, MLFlow])
@pytest.mark.parametrize(("log_model", "behind"), [("all", False), (True, False), pytest.param(True, True)])
def test_loggers_upload_whole_checkpoint_directories(kind: Any, log_model: Any, behind: bool) -> None:
    uploads = run_trainers(uploaded, kind, log_model, behind, devices=1)[0].value
    assert len(uploads) == (2 if log_model == "all" else 1)
    for name, files in uploads:
        assert name == "model.ckpt" or name.startswith("step=")
        assert {"COMPLETE", "index.json", "meta.pt", "rank-00000.bin"} <= set(files)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), pytest.param((1, 2, 1), marks=WIDE)])
def test_the_start_of_a_resumed_fit_meets_what_was_loaded(sizes: tuple[int, int, int]) -> None:
    steps, weight = run_trainers(met_at_the_start, None, devices=1)[0].value
    assert steps == 1
    outcomes = run_trainers(met_at_the_start, sizes, devices=sizes[0] * sizes[1] * sizes[2])
    assert {outcome.value[0] for outcome in outcomes} == {1}
    assert outcomes[0].value[1] == pytest.approx(weight, abs=0, rel=1e-12 if sizes[0] > 1 else 0)  # stages add by parts


@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 1, 2), pytest.param((2, 1, 2), marks=WIDE)])
def test_summaries_count_the_whole_module_whenever_they_are_made(sizes: tuple[int, int, int]) -> None:
    counts = run_trainers(summarized, None, devices=1)[0].value
    for outcome in run_trainers(summarized, sizes, devices=sizes[0] * sizes[1] * sizes[2]):
        assert outcome.value == counts


@pytest.mark.parametrize("sizes", [(1, 1, 1), pytest.param((1, 2, 1), marks=WIDE), pytest.param((2, 1, 1), marks=WIDE)])
def test_a_log_in_predict_step_is_refused_where_it_is(sizes: tuple[int, int, int]) -> None:
    devices = sizes[0] * sizes[1] * sizes[2]
    alone = run_trainers(logged, None, devices=1, check=False)[0]
    assert alone.error is not None and "predict" in alone.error
    for outcome in run_trainers(logged, sizes, devices=devices, check=False, grace=20, deadline=60):
        assert outcome.error is not None and alone.error in outcome.error
        assert 'self.log("x", 1.0)' in outcome.trace


@pytest.mark.parametrize("devices", [1, 2])
def test_copies_of_a_trainer_train(devices: int) -> None:
    assert [outcome.value for outcome in run_trainers(copied, devices=devices)] == [[2, 2]] * devices


@pytest.mark.parametrize("sizes", [(1, 1, 1), pytest.param((1, 2, 1), marks=WIDE)])
def test_copies_of_a_running_trainer_train(sizes: tuple[int, int, int]) -> None:
    steps, (module, weights) = run_trainers(copied_meanwhile, sizes, devices=sizes[1])[0].value
    assert steps == [3] * 6
    assert module < 2 * weights + 10_000, "no more than the weights, which lie in buckets, once"


@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 1, 2), pytest.param((2, 1, 2), marks=WIDE)])
def test_a_part_of_a_module_is_not_pickled(sizes: tuple[int, int, int]) -> None:
    for outcome in run_trainers(refused_to_pickle, sizes, devices=sizes[0] * sizes[2]):
        assert len(outcome.value) == 12
        assert all("strategy.full_state_dict()" in refusal for refusal in outcome.value), outcome.value


def test_a_timer_whose_time_is_used_up_takes_no_further_step() -> None:
    assert run_trainers(out_of_time, devices=1)[0].value == 1


def test_a_traced_graph_is_refused_where_no_rank_has_the_whole_forward() -> None:
    trainer: Any = SimpleNamespace(loggers=[SimpleNamespace(_log_graph=True), SimpleNamespace()])
    refuse_graphs(trainer, Layout(tensor=1, context=1, data=2, pipeline=1))
    with pytest.raises(MisconfigurationException, match=r"`tensor_parallel_size=2`.*leave `log_graph` out"):
        refuse_graphs(trainer, Layout(tensor=2, context=1, data=1, pipeline=1))


class _Parser:
    def parse_object(self, given: Any, config: Any) -> Any:
        command = config["subcommand"]
        return _Config({**config, command: {**config[command], "given": given[command]["model"]}})


class _Config(dict[str, Any]):
    subcommand = property(lambda self: self["subcommand"])


def test_a_command_reads_hyperparameters_from_a_directory(tmp_path: Path) -> None:
    content = {"state_dict": {"a": torch.ones(2)}, "hyper_parameters": {"scale": 3.0, "_instantiator": "x"}}
    torch.save(content, tmp_path / "plain.ckpt")
    import_checkpoint(open_source(tmp_path / "plain.ckpt"), tmp_path / "run.ckpt")
    line = object.__new__(cli.LightningCLI)
    line.parser = _Parser()  # type: ignore[assignment]
    for path in (tmp_path / "plain.ckpt", tmp_path / "run.ckpt"):
        line.config = _Config(subcommand="test", test={"ckpt_path": str(path)})
        line._parse_ckpt_path()
        assert line.config["test"] == {"ckpt_path": str(path), "given": {"scale": 3.0}}
    line.config = _Config(subcommand="test", test={"ckpt_path": None})
    line._parse_ckpt_path()
    assert line.config["test"] == {"ckpt_path": None}


def test_a_command_line_knows_the_strategy_by_its_short_name() -> None:
    check = (
        "import lightning_megatron, sys; assert 'lightning_megatron.strategy.strategy' not in sys.modules; "
        "import lightning.pytorch.cli; from lightning.pytorch.strategies import Strategy\n"
        "def below(kind): return {kind.__name__}.union(*map(below, kind.__subclasses__()))\n"
        "assert 'MegatronStrategy' in below(Strategy)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=120, env=environment())


def test_data_is_a_module_to_import_names_from_and_costs_nothing() -> None:
    asked = (
        "import sys, lightning_megatron as package, lightning_megatron.data as other; "
        "assert not {'torch', 'lightning', 'datasets'} & {*sys.modules}; "
        "from lightning_megatron.data import pack; from lightning_megatron import data; "
        "assert other is data is package.data and data.pack is pack"
    )
    subprocess.run([sys.executable, "-c", asked], env=environment(), timeout=120, check=True)


def test_a_notebook_may_train_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True)
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False}
    assert Trainer(strategy=MegatronStrategy(), devices=1, **options).world_size == 1
    with pytest.raises(MisconfigurationException, match="not compatible with an interactive environment"):
        Trainer(strategy=MegatronStrategy(pipeline_parallel_size=2), devices=2, **options)
    with pytest.raises(MisconfigurationException, match="not compatible with an interactive environment"):
        Trainer(strategy=MegatronStrategy(pipeline_parallel_size=2), devices=1, num_nodes=2, **options)


def test_a_state_on_disk_is_a_dict_that_reads_what_is_asked_for() -> None:
    read: list[str] = []

    def reading(name: str) -> torch.Tensor:
        read.append(name)
        return torch.ones(2)

    kinds = {name: (torch.Size([2]), torch.float32) for name in "abc"}
    state = StateOnDisk(kinds, {"a": "a", "b": "b", "c": "c", "z": "a"}, reading)
    assert list(state) == ["a", "b", "c", "z"] and "b" in state and len(state) == 4
    state["f"] = state.pop("b")
    del state["c"]
    state |= {"x": 3}
    assert read == ["b"] and state.untouched == {"a": "a", "z": "a"}
    assert set(state.kinds_now()) == {"a", "z", "f"} and read == ["b"]
    copies = [dict(state), {**state}, dict(state.items()), state.copy(), copy.deepcopy(state), state | {}, {} | state]
    for each in copies:
        assert type(each) is dict and all(isinstance(each[name], torch.Tensor) for name in "afz") and each["x"] == 3
    assert state.get("b") is None and state.popitem() == ("x", 3)
