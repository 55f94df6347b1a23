"""Adapters by themselves: saved by the strategy, and checkpoints that leave the frozen weights out."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from lightning_megatron.checkpoints.files.adapters import Adapter
from lightning_megatron.checkpoints.files.frozen_beside import WithFrozen
from lightning_megatron.checkpoints.files.sources import load_whole, open_source
from tests.checkpoints.adapter_scenarios import Adapted, base_of, logits_of, merged_for_good, saved_alone, train_small
from tests.checkpoints.commands import command
from tests.harness import one_process, run_trainers

LAYOUT = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "micro_batch_size": 2}
SHARDED = {"data_parallel_size": 2, "weight_sharding": True}


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("kind", "adapter", "sizes"),
    [
        ("llama", None, {"tensor_parallel_size": 2}),
        ("layers saved", None, {"pipeline_parallel_size": 2}),
        *(
            pytest.param(kind, adapter, sizes, marks=pytest.mark.wide)
            for kind, adapter in (
                ("llama", None),
                ("two", "other"),
                ("p-tuning", None),
                ("prefix", None),
                ("ia3", None),
            )
            for sizes in (LAYOUT, {"data_parallel_size": 2}, SHARDED)
        ),
    ],
    ids=str,
)
def test_an_adapter_is_saved_alone_from_a_hook(
    kind: str, adapter: str | None, sizes: dict[str, Any], tmp_path: Path
) -> None:
    devices = math.prod(size for name, size in sizes.items() if name.endswith("_parallel_size"))
    first, *others = run_trainers(saved_alone, kind, str(tmp_path / "adapter"), sizes, adapter, devices=devices)
    assert all("holds these adapters" in outcome.value[0] for outcome in (first, *others))
    assert {file.name for file in (tmp_path / "adapter").iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
    }
    module = Adapted(kind)
    module.load_state_dict(first.value[1])
    if adapter is not None:
        module.model.set_adapter(adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(base_of(kind), str(tmp_path / "adapter")).double()
    torch.testing.assert_close(logits_of(model), logits_of(module.model), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "axis", ["tensor_parallel_size", pytest.param("pipeline_parallel_size", marks=pytest.mark.wide)]
)
def test_an_adapter_that_a_hook_merges_for_good_is_refused_where_weights_are_divided(axis: str) -> None:
    for outcome in run_trainers(merged_for_good, {axis: 2}, devices=2, check=False, grace=20):
        said = f"{outcome.error}{outcome.trace}"
        assert ".base_layer` in a hook" in said and "export --merge-adapters`" in said, outcome


@pytest.mark.wide
@pytest.mark.parametrize(
    ("how", "sizes", "then"),
    [
        ("hook", {"tensor_parallel_size": 2}, {"tensor_parallel_size": 2}),
        *(
            pytest.param(how, sizes, then, marks=pytest.mark.wide)
            for how in ("hook", "state")
            for sizes, then in (
                (LAYOUT, LAYOUT),
                (LAYOUT, {"data_parallel_size": 2}),
                (
                    SHARDED,
                    SHARDED,
                ),
            )
        ),
    ],
    ids=str,
)
def test_a_run_goes_on_from_a_checkpoint_without_the_frozen_weights(
    how: str, sizes: dict[str, Any], then: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "small.ckpt"
    first, second = (math.prod(n for k, n in each.items() if k.endswith("_parallel_size")) for each in (sizes, then))
    run_trainers(train_small, how, str(path), sizes, 2, True, devices=first)
    found = run_trainers(train_small, how, str(path), then, 4, False, devices=second)[0].value
    wanted = one_process(train_small, how, "", {}, 4, False)
    assert found.keys() & wanted.keys()
    for name in found:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-9)
    stored = load_whole(path)["state_dict"]
    assert not any("base_layer" in name for name in stored)
    command("export", path, tmp_path / "adapter", "--format", "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.PeftModel.from_pretrained(base_of("llama"), str(tmp_path / "adapter")).double()
    merge = "export", path, tmp_path / "merged", "--merge-adapters"
    assert "it was saved without the frozen weights" in " ".join(command(*merge, fails=True).split())
    base_of("llama").save_pretrained(tmp_path / "base")
    command(*merge, "--base", tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    torch.testing.assert_close(logits_of(model), logits_of(adapted), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"model.norm.weight": torch.ones(4)}, "`--base` has no `m.model.layers.0.q_proj.weight`"),
        (
            {"model.layers.0.q_proj.weight": torch.ones(4, 8)},
            r"of shape \(4, 8\), and adapter 'default' is for \(8, 4\)",
        ),
    ],
)
def test_a_folder_of_another_model_is_refused(weights: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    save_file(weights, tmp_path / "model.safetensors")
    module = "m.model.layers.0.q_proj."
    halves = {f"{module}lora_A.default.weight": torch.ones(2, 4), f"{module}lora_B.default.weight": torch.ones(8, 2)}
    how = {module: {"scale": 1.0, "transposed": False, "magnitude": False}}
    adapter = Adapter("default", "m.", {}, {name: name for name in halves}, how)
    save_file(halves, tmp_path / "adapter.safetensors")
    with pytest.raises(ValueError, match=message):
        WithFrozen(open_source(tmp_path / "adapter.safetensors"), open_source(tmp_path), "m.", [adapter])
