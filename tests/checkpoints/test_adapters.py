"""Adapters trained at a layout are written as peft writes them, or added to the weights; plain libraries load both."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from lightning_megatron.checkpoints.files.sources import load_whole
from tests.checkpoints.adapter_scenarios import (
    OTHERS,
    Adapted,
    base_of,
    held_by_training,
    logits_of,
    train_adapter,
    trained,
)
from tests.checkpoints.commands import command
from tests.harness import run_trainers

PREFIX = "model.prompt_encoder.default.embedding.weight"
_TWO_REPLICAS = {"data_parallel_size": 2}
LAYOUT = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "micro_batch_size": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


def _alone(kind: str, folder: Path) -> Tensor:
    """Logits of the module that one process has trained."""
    module = Adapted(kind)
    module.load_state_dict(torch.load(trained(kind, folder), weights_only=True)["state_dict"])
    return logits_of(module.model)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "layers saved",
        "prompt",
        *(
            pytest.param(k, marks=pytest.mark.wide)
            for k in ("dora", "ia3", "gpt2", "prefix", "projected prefix", *OTHERS)
        ),
    ],
)
def test_plain_peft_loads_an_exported_adapter(kind: str, folder: Path, tmp_path: Path) -> None:
    path, wanted = trained(kind, folder, **LAYOUT), _alone(kind, folder)
    command("export", path, tmp_path / "adapter", "--format", "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(base_of(kind), str(tmp_path / "adapter")).double()
    torch.testing.assert_close(logits_of(model), wanted, rtol=0, atol=1e-6)  # Hugging Face's norms are in float32
    assert set(json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())) >= {"peft_type", "task_type"}
    Adapted(kind).model.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors").keys() for name in ("adapter", "peft"))
    assert ours == theirs
    message = command("export", path, tmp_path / "plain", "--prefix", "model.base_model.", fails=True)
    assert "--merge-adapters" in message


@pytest.mark.parametrize("sizes", [{"pipeline_parallel_size": 2, "data_parallel_size": 2, "micro_batch_size": 2}])
@pytest.mark.parametrize("kind", ["llama", pytest.param("prefix", marks=pytest.mark.wide)])
def test_only_what_trains_has_optimizer_state_and_gradients(kind: str, sizes: dict[str, int]) -> None:
    trained = sum(parameter.numel() for parameter in Adapted(kind).parameters() if parameter.requires_grad)
    outcomes = [outcome.value for outcome in run_trainers(held_by_training, kind, sizes, devices=4)]
    state, gradients = (sum(values) for values in zip(*outcomes, strict=True))
    assert 2 * 8 * trained <= state <= 2 * 8 * trained + 4 * 512, "two moments in float64, each on one replica"
    assert gradients <= 2 * 8 * trained + 4 * 512, "no more than one on each replica"


@pytest.mark.wide
@pytest.mark.parametrize("kind", OTHERS)
def test_adapters_of_other_kinds_train_at_a_layout(kind: str, folder: Path) -> None:
    wanted = torch.load(trained(kind, folder), weights_only=True)["state_dict"]
    found, untrained = load_whole(trained(kind, folder, **LAYOUT))["state_dict"], Adapted(kind).state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-7)
    assert any(not torch.equal(untrained[name], value) for name, value in wanted.items())


@pytest.mark.parametrize(
    "sizes",
    [
        {"data_parallel_size": 2},
        *(pytest.param({"tensor_parallel_size": 2, **more}, marks=pytest.mark.wide) for more in ({}, _TWO_REPLICAS)),
    ],
    ids=str,
)
def test_adalora_moves_ranks_between_layers_as_in_one_process(sizes: dict[str, Any], folder: Path) -> None:
    wanted = torch.load(trained("adalora", folder), weights_only=True)["state_dict"]
    found = load_whole(trained("adalora", folder, **sizes))["state_dict"]
    assert any(bool((value == 0).any()) for name, value in wanted.items() if "lora_E" in name), "some are pruned"
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-7)


def test_adalora_is_refused_under_a_pipeline(folder: Path) -> None:
    sizes = {"pipeline_parallel_size": 2}
    for outcome in run_trainers(train_adapter, "adalora", str(folder / "refused"), sizes, devices=2, check=False):
        assert "`model` is an AdaLoRA" in f"{outcome.error}{outcome.trace}{outcome.output}", outcome


@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(k, marks=pytest.mark.wide) for k in ("dora", "gpt2", "embedding dora"))]
)
def test_plain_transformers_loads_a_merged_model(kind: str, folder: Path, tmp_path: Path) -> None:
    path, wanted = trained(kind, folder, **LAYOUT), _alone(kind, folder)
    command("export", path, tmp_path / "merged", "--merge-adapters", "--shard-gb", "0.00002")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    torch.testing.assert_close(logits_of(model), wanted, rtol=0, atol=1e-6)
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "merged") is not None
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 1


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_an_embedding_with_dora_is_merged(size: int, folder: Path, tmp_path: Path) -> None:
    path, wanted = trained("embedding dora", folder, tensor_parallel_size=size), _alone("embedding dora", folder)
    command("export", path, tmp_path / "merged", "--merge-adapters")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    torch.testing.assert_close(logits_of(model), wanted, rtol=0, atol=1e-6)


PREFIX_LAYOUTS: list[Any] = [
    {"pipeline_parallel_size": 2, "micro_batch_size": 2},
    {"tensor_parallel_size": 2},
    *(
        pytest.param({**sizes, **others}, marks=pytest.mark.wide)
        for sizes, others in (
            ({"pipeline_parallel_size": 2, "micro_batch_size": 2}, {"activation_recompute": "full"}),
            ({"tensor_parallel_size": 2}, {"activation_recompute": "full"}),
            ({"tensor_parallel_size": 4}, {}),
            (LAYOUT, {}),
            (LAYOUT, {"activation_recompute": "full"}),
        )
    ),
]


@pytest.mark.parametrize("kind", ["prefix", *(pytest.param(k, marks=pytest.mark.wide) for k in ("few prefix", "one"))])
@pytest.mark.parametrize("sizes", PREFIX_LAYOUTS, ids=str)
def test_a_prefix_that_enters_the_layers_trains_at_a_layout(kind: str, sizes: dict[str, Any], folder: Path) -> None:
    path = trained(kind, folder, **sizes)
    wanted = torch.load(trained(kind, folder), weights_only=True)["state_dict"]
    found = load_whole(path)["state_dict"]
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-7 if "tensor_parallel_size" in sizes else 1e-9)
    untrained = Adapted(kind).state_dict()
    assert not torch.allclose(untrained[PREFIX], wanted[PREFIX], rtol=0, atol=1e-4)


TIED = ["tied embedding", *(pytest.param(k, marks=pytest.mark.wide) for k in ("tied head", "tied head saved"))]


@pytest.mark.wide
@pytest.mark.parametrize("kind", TIED)
def test_a_tied_tensor_that_is_adapted_under_one_name_becomes_two(kind: str, folder: Path, tmp_path: Path) -> None:
    path, wanted = trained(kind, folder, **LAYOUT), _alone(kind, folder)
    command("export", path, tmp_path / "merged", "--merge-adapters")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    torch.testing.assert_close(logits_of(model), wanted, rtol=0, atol=1e-6)
    assert not torch.equal(model.model.embed_tokens.weight, model.lm_head.weight)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["in turns", pytest.param("both", marks=pytest.mark.wide)])
def test_two_adapters_train_at_a_layout_and_are_written_one_by_one(kind: str, folder: Path, tmp_path: Path) -> None:
    path, wanted = trained(kind, folder, **LAYOUT), torch.load(trained(kind, folder), weights_only=True)
    found, untrained = load_whole(path)["state_dict"], Adapted(kind).state_dict()
    assert found.keys() == wanted["state_dict"].keys()
    for name, value in wanted["state_dict"].items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
        assert ".lora_B." not in name or not torch.equal(value, untrained[name]), f"{name} has not trained"
    for adapter in ("default", "other"):
        command("export", path, tmp_path / adapter, "--format", "adapter", "--adapter", adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(base_of(kind), str(tmp_path / "default"))
        model.load_adapter(str(tmp_path / "other"), "other")
    for name, value in model.double().state_dict().items():
        torch.testing.assert_close(value, found[f"model.{name}"], rtol=0, atol=0)


@pytest.mark.parametrize("adapter", ["default", "other"])
def test_one_of_two_adapters_is_merged_as_peft_merges_it(adapter: str, folder: Path, tmp_path: Path) -> None:
    path = trained("two", folder)
    module = Adapted("two")
    module.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    plain = module.model.merge_and_unload(adapter_names=[adapter])
    command(
        "export",
        trained("two", folder, pipeline_parallel_size=1),
        tmp_path / "merged",
        "--merge-adapters",
        "--adapter",
        adapter,
    )
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float64, output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"]
    torch.testing.assert_close(logits_of(model), logits_of(plain), rtol=0, atol=1e-6)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.5, -2.0)])
def test_several_adapters_are_merged(weights: tuple[float, float], folder: Path, tmp_path: Path) -> None:
    path = trained("two", folder, pipeline_parallel_size=1)
    module = Adapted("two")
    module.load_state_dict(load_whole(path)["state_dict"])
    for layer in module.model.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            for name, weight in zip(("default", "other"), weights, strict=True):
                if name in layer.scaling:
                    layer.scaling[name] *= weight
    plain = module.model.merge_and_unload(adapter_names=["default", "other"])
    named = [f"{name}={weight}" for name, weight in zip(("default", "other"), weights, strict=True)]
    command("export", path, tmp_path / "m", "--merge-adapters", "--adapter", named[0], "--adapter", named[1])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float64)
    torch.testing.assert_close(logits_of(model), logits_of(plain), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("default=x", "other"), "is no number"),
        (("default", "default"), "is given twice"),
        (("default", "absent"), "holds these adapters"),
    ],
)
def test_adapters_that_cannot_be_merged_together_are_refused(
    names: tuple[str, str], words: str, folder: Path, tmp_path: Path
) -> None:
    path = trained("two", folder, pipeline_parallel_size=1)
    given = [part for name in names for part in ("--adapter", name)]
    message = command("export", path, tmp_path / "m", "--merge-adapters", *given, fails=True)
    assert words in " ".join(message.split())


def test_what_is_no_product_of_two_matrices_is_not_left_out(folder: Path, tmp_path: Path) -> None:
    path = trained("bias", folder, pipeline_parallel_size=1)
    assert "lora_B.default.bias" in command("export", path, tmp_path / "a", "--merge-adapters", fails=True)


@pytest.mark.parametrize("kind", ["p-tuning", pytest.param("projected prefix", marks=pytest.mark.wide)])
def test_an_encoder_of_prompts_is_written_as_what_it_makes(kind: str, folder: Path, tmp_path: Path) -> None:
    path = trained(kind, folder, pipeline_parallel_size=1)
    command("export", path, tmp_path / "ours", "--format", "adapter")
    module = Adapted(kind)
    module.load_state_dict(load_whole(path)["state_dict"])
    module.model.save_pretrained(tmp_path / "peft")
    _check_alike(tmp_path)


def _check_alike(path: Path) -> None:
    """What is in the folders ``ours`` and ``peft`` is the same adapter."""
    ours, theirs = (load_file(path / name / "adapter_model.safetensors") for name in ("ours", "peft"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value.to(ours[name].dtype), rtol=0, atol=1e-9)


def test_adalora_is_written_as_peft_writes_it_without_the_ranks_that_it_has_given_up(
    folder: Path, tmp_path: Path
) -> None:
    path = trained("adalora", folder, data_parallel_size=2)
    command("export", path, tmp_path / "ours", "--format", "adapter")
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert any(not all(kept) for kept in config["rank_pattern"].values())
    module = Adapted("adalora")
    module.load_state_dict(load_whole(path)["state_dict"])
    ranks = {name.replace("lora_E", "lora_E.default"): kept for name, kept in config["rank_pattern"].items()}
    module.model.peft_config["default"].rank_pattern = ranks
    module.model.save_pretrained(tmp_path / "peft")
    _check_alike(tmp_path)
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["rank_pattern"] == config["rank_pattern"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.PeftModel.from_pretrained(base_of("adalora"), str(tmp_path / "ours"))


def test_adapters_that_cannot_be_written_so_are_refused(folder: Path, tmp_path: Path) -> None:
    path = trained("prompt", folder, **LAYOUT)
    assert "no weights can take up" in command("export", path, tmp_path / "a", "--merge-adapters", fails=True)
    assert "these adapters" in command(
        "export", path, tmp_path / "b", "--format", "adapter", "--adapter", "x", fails=True
    )
    assert "safetensors" in command("export", path, tmp_path / "c.ckpt", "--merge-adapters", fails=True)
    assert "tokenizer" in command("export", path, tmp_path / "d", "--tokenizer", tmp_path, fails=True)
    assert not any((tmp_path / name).exists() for name in ("a", "b", "c.ckpt", "d"))


def test_a_tokenizer_is_copied_beside_the_weights(folder: Path, tmp_path: Path) -> None:
    path = trained("llama", folder, **LAYOUT)
    (tmp_path / "words").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "notes.txt"):
        (tmp_path / "words" / name).write_text("{}")
    command("export", path, tmp_path / "merged", "--merge-adapters", "--tokenizer", tmp_path / "words")
    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= {
        f.name for f in (tmp_path / "merged").iterdir()
    }
    assert not (tmp_path / "merged" / "notes.txt").exists()
