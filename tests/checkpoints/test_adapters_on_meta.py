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
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_megatron import MegatronStrategy, load_hf_weights
from lightning_megatron.checkpoints.loading.adapted import names_in_files
from tests.checkpoints.adapter_scenarios import Adapted, base_of, config_of
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.train import make_trainer

wide = pytest.mark.wide
LAYOUT = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "micro_batch_size": 2}
SHARDED = {"data_parallel_size": 2, "weight_sharding": True}
_VIRTUAL = ("prompt", "prefix")


class Built(Adapted):
    """Built without memory."""

    def __init__(self, kind: str, folder: str) -> None:
        LightningModule.__init__(self)
        self.kind, self.folder, self.model = kind, folder, None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        config = AutoConfig.from_pretrained(self.folder)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            base = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
            with torch.device("cpu" if self.kind in _VIRTUAL else "meta"):
                self.model = peft.get_peft_model(base, config_of(self.kind)).double()
        load_hf_weights(self, self.folder)


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


@pytest.mark.parametrize("kind", ["dora", *(pytest.param(kind, marks=wide) for kind in ("norms", "some tokens"))])
def test_adapters_that_start_from_the_weights_are_refused(kind: str, tmp_path: Path) -> None:
    base_of(kind).save_pretrained(tmp_path)
    for outcome in run_trainers(refused, kind, str(tmp_path), devices=2):
        assert "Build the module with its weights (`from_pretrained`)" in outcome.value, outcome.value


def test_names_in_files_leave_adapters_out() -> None:
    names = ["a.base_layer.w", "a.lora_A.default.w", "b.w", "c.original_module.d.w", "c.modules_to_save.default.d.w"]
    wanted = {names[0]: "a.w", names[2]: "b.w", names[3]: "c.d.w", names[4]: "c.d.w"}
    assert names_in_files(names) == wanted
