"""Models of which peft has wrapped the layers on the meta device, and whose weights come from files."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_megatron import MegatronStrategy, load_hf_weights
from lightning_megatron.checkpoints.files.sources import load_whole
from lightning_megatron.checkpoints.loading.adapted import names_in_files
from tests.checkpoints.adapter_scenarios import Adapted, base_of, config_of, logits_of, train_adapter
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.train import make_trainer

wide = pytest.mark.wide
LAYOUT = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "micro_batch_size": 2}
SHARDED = {"data_parallel_size": 2, "weight_sharding": True}
_VIRTUAL = ("prompt", "prefix")


class Built(Adapted):
    """Built without memory.

    Args:
        kind: of the adapter.
        folder: of the model.
        loads: whether the weights come from there.
    """

    def __init__(self, kind: str, folder: str, loads: bool = True) -> None:
        LightningModule.__init__(self)
        self.kind, self.folder, self.loads, self.model = kind, folder, loads, None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        config = AutoConfig.from_pretrained(self.folder)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(1)
            base = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
            with torch.device("cpu" if self.kind in _VIRTUAL else "meta"):
                self.model = peft.get_peft_model(base, config_of(self.kind)).double()
        if self.loads:
            load_hf_weights(self, self.folder)

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self.model.eval()(input_ids=batch).logits


def predicted(info: RankInfo, folder: str, path: str | None, sizes: dict[str, Any]) -> Any:
    """Logits of a model with an adapter, whose weights are streamed from a checkpoint; or what is raised, from the
    folder."""
    strategy = MegatronStrategy(**sizes, weight_streaming="disk", initial_weights=path)
    tokens: Any = DataLoader(torch.arange(8)[None], batch_size=1)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found: Any = make_trainer(info, strategy).predict(Built("llama", folder, path is None), tokens)
        except RuntimeError as error:
            return str(error)
    windows = strategy.run.assembled.streamed.windows
    assert windows.peak_bytes <= sum(sorted(window.size for window in windows.windows)[-2:])
    return found[0]


def train(info: RankInfo, kind: str, folder: str, sizes: dict[str, Any], steps: int) -> dict[str, Tensor]:
    """The whole state after some steps."""
    strategy, module = MegatronStrategy(**sizes), Built(kind, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer(info, strategy, max_steps=steps).fit(module)
    return strategy.full_state_dict()


def refused(info: RankInfo, kind: str, folder: str) -> str:
    """What is raised."""
    try:
        train(info, kind, folder, {"tensor_parallel_size": info.world_size}, 1)
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("llama", {"tensor_parallel_size": 2}),
        *(
            pytest.param(kind, sizes, marks=wide)
            for kind in ("llama", "tied embedding", "gpt2", "tied head", "ia3", "prompt", "prefix")
            for sizes in (LAYOUT, {"data_parallel_size": 2}, SHARDED)
        ),
    ],
    ids=str,
)
def test_the_base_comes_from_files_and_the_adapter_from_its_constructor(
    kind: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    base_of(kind).save_pretrained(tmp_path)
    devices = math.prod(size for name, size in sizes.items() if name.endswith("_parallel_size"))
    found = run_trainers(train, kind, str(tmp_path), sizes, 2, devices=devices)[0].value
    wanted = one_process(train, kind, str(tmp_path), {}, 2)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-8)
    module = Adapted(kind)  # of plain peft, built with memory
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert wanted.keys() == module.state_dict().keys()
    for name, value in module.state_dict().items():
        if name not in trained:
            torch.testing.assert_close(wanted[name], value, rtol=0, atol=0)


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["dora", *(pytest.param(kind, marks=wide) for kind in ("norms", "some tokens"))])
def test_adapters_that_start_from_the_weights_are_refused(kind: str, tmp_path: Path) -> None:
    base_of(kind).save_pretrained(tmp_path)
    for outcome in run_trainers(refused, kind, str(tmp_path), devices=2):
        assert "Build the module with its weights (`from_pretrained`)" in outcome.value, outcome.value


def test_adapters_that_change_the_weights_are_refused(tmp_path: Path) -> None:
    """PiSSA makes adapters of a weight's largest singular vectors, and leaves the rest in its place."""
    base_of("llama").float().save_pretrained(tmp_path)
    for outcome in run_trainers(refused, "pissa", str(tmp_path), devices=2):
        assert "base_layer.weight`, which is read from" in outcome.value, outcome.value


def test_names_in_files_leave_adapters_out() -> None:
    names = ["a.base_layer.w", "a.lora_A.default.w", "b.w", "c.original_module.d.w", "c.modules_to_save.default.d.w"]
    wanted = {names[0]: "a.w", names[2]: "b.w", names[3]: "c.d.w", names[4]: "c.d.w"}
    assert names_in_files(names) == wanted


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_parallel_size": 2},
        *(
            pytest.param({"pipeline_parallel_size": 2, **more}, marks=wide)
            for more in ({}, {"tensor_parallel_size": 2})
        ),
    ],
    ids=str,
)
def test_weights_and_adapters_are_streamed_from_a_checkpoint(sizes: dict[str, int], tmp_path: Path) -> None:
    path, folder, devices = str(tmp_path / "c.ckpt"), str(tmp_path / "model"), math.prod(sizes.values())
    base_of("llama").save_pretrained(folder)
    run_trainers(train_adapter, "llama", path, {"data_parallel_size": 2}, devices=2)
    plain = Adapted("llama")
    plain.load_state_dict(load_whole(path)["state_dict"])
    for outcome in run_trainers(predicted, folder, path, sizes, devices=devices):
        torch.testing.assert_close(outcome.value, logits_of(plain.model), rtol=1e-9, atol=1e-9)


def test_adapters_are_not_streamed_from_the_folder_of_a_model(tmp_path: Path) -> None:
    base_of("llama").save_pretrained(tmp_path)
    (outcome,) = run_trainers(predicted, str(tmp_path), None, {}, devices=1)
    assert "a folder of its model has none: read both from a checkpoint that has them" in outcome.value


def started(info: RankInfo, kind: str, folder: str, sizes: dict[str, Any]) -> dict[str, Tensor]:
    """The whole state before any step."""
    strategy, module = MegatronStrategy(**sizes), Built(kind, folder)
    tokens: Any = DataLoader(torch.arange(8)[None], batch_size=1)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer(info, strategy).predict(module, tokens)
    return strategy.full_state_dict()


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("llama", {"tensor_parallel_size": 2}),
        *(
            pytest.param(kind, sizes, marks=wide)
            for kind in ("gpt2", "tied embedding", "ia3")
            for sizes in ({"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2})
        ),
    ],
    ids=str,
)
def test_adapters_start_as_behind_from_pretrained(kind: str, sizes: dict[str, int], tmp_path: Path) -> None:
    base_of(kind).save_pretrained(tmp_path)
    ranks = run_trainers(started, kind, str(tmp_path), sizes, devices=math.prod(sizes.values()))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # as in `configure_model` with that precision
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(1)
            base = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
            model = peft.get_peft_model(base, config_of(kind)).double()
    finally:
        torch.set_default_dtype(before)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(ranks[0].value[f"model.{name}"], value, rtol=0, atol=0, msg=name)
