"""Files of Hugging Face's have names and shapes of their own; they are read, imported and written so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch import LightningModule
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy, load_hf_weights
from tests.checkpoints.commands import command
from tests.harness import RankInfo, run_trainers
from tests.parity.train import make_trainer
from tests.parity.zoo.huggingface import CONFIGS

FEW = ("gpt_neox", "mixtral")
FAMILIES = [*FEW, *(pytest.param(name, marks=pytest.mark.wide) for name in CONFIGS if name not in FEW)]


def _model(family: str, **more: Any) -> Any:
    config, kind, options = CONFIGS[family]
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**{**options, **more}))


def _stored(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def _equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def _loaded(model: Any, folder: Path) -> Any:
    with torch.device("meta"):
        empty = type(model)(model.config)
    load_hf_weights(empty, folder)
    return empty


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_converted_in_both_directions(family: str, tmp_path: Path) -> None:
    model = _model(family)
    model.save_pretrained(tmp_path / "model")
    _equal(_loaded(model, tmp_path / "model").state_dict(), model.state_dict())
    command("import", tmp_path / "model", tmp_path / "checkpoint", "--prefix", "model.")
    command("export", tmp_path / "checkpoint", tmp_path / "again", "--shard-gb", "0.00001")
    _equal(_stored(tmp_path / "again"), _stored(tmp_path / "model"))
    _equal(type(model).from_pretrained(tmp_path / "again").state_dict(), model.state_dict())


_SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
_HYBRID = {"num_local_experts": 4, "num_experts_per_tok": 2, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("Camembert", {}, id="tied, and stored under the name that comes last"),
        pytest.param("GraniteMoeHybrid", {**_HYBRID, "num_key_value_heads": 2}, id="an infinity in its config"),
    ],
)
def test_a_model_with_a_habit_of_its_own_is_converted(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**_SIZES, **options, intermediate_size=48, pad_token_id=0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.save_pretrained(tmp_path / "model")
    _equal(_loaded(model, tmp_path / "model").state_dict(), model.state_dict())
    command("import", tmp_path / "model", tmp_path / "checkpoint", "--prefix", "model.")
    command("export", tmp_path / "checkpoint", tmp_path / "again")
    _equal(_stored(tmp_path / "again"), _stored(tmp_path / "model"))


def test_files_that_have_the_names_of_the_module_are_read_too(tmp_path: Path) -> None:
    model = _model("mixtral", num_local_experts=12)  # which sort otherwise as words
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    _equal(_loaded(model, tmp_path).state_dict(), model.state_dict())
    for file in (*tmp_path.glob("*.safetensors"), tmp_path / "model.safetensors.index.json"):
        file.unlink()
    save_file({name: value.clone() for name, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    _equal(_loaded(model, tmp_path).state_dict(), model.state_dict())


def test_an_expert_that_is_not_there_is_missed(tmp_path: Path) -> None:
    model = _model("mixtral")
    model.save_pretrained(tmp_path)
    tensors = _stored(tmp_path)
    del tensors["model.layers.1.block_sparse_moe.experts.1.w3.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"do not fit.*model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        _loaded(model, tmp_path)


class Later(LightningModule):
    """A model whose weights are read part by part."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder, self.model = folder, None

    def configure_model(self) -> None:
        if self.model is None:
            config = transformers.AutoConfig.from_pretrained(self.folder)
            with torch.device("meta"):
                self.model = transformers.AutoModelForCausalLM.from_config(config)
            load_hf_weights(self, self.folder)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def part_by_part(info: RankInfo, folder: str, sizes: dict[str, int], path: str) -> None:
    """Read on ranks, into memory that is NaN as it comes, and written again as a checkpoint."""
    trainer = make_trainer(info, MegatronStrategy(**sizes), max_steps=1, precision="32-true", deterministic=True)
    trainer.fit(Later(folder), DataLoader(torch.arange(16).view(2, 8), batch_size=2))  # type: ignore[arg-type]
    trainer.save_checkpoint(path)


def too_exact(info: RankInfo, folder: str) -> None:
    """Float64, in which grouped experts cannot compute."""
    make_trainer(info, MegatronStrategy(), max_steps=1).fit(Later(folder), DataLoader([torch.arange(8)]))  # type: ignore[arg-type]


def test_a_run_refused_before_weights_are_read_says_why(tmp_path: Path) -> None:
    _model("mixtral", experts_implementation="grouped_mm").save_pretrained(tmp_path)
    (outcome,) = run_trainers(too_exact, str(tmp_path), devices=1, check=False, grace=20)
    assert outcome.error is not None and "experts_implementation='eager'" in outcome.error


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("mixtral", {"pipeline_parallel_size": 2}),
        pytest.param("mixtral", {"tensor_parallel_size": 2}, marks=pytest.mark.wide),
        pytest.param("gpt_neox", {"tensor_parallel_size": 2}, marks=pytest.mark.wide),
    ],
)
def test_ranks_read_their_parts(family: str, sizes: dict[str, int], tmp_path: Path) -> None:
    model = _model(family)
    model.save_pretrained(tmp_path / "model")
    run_trainers(part_by_part, str(tmp_path / "model"), sizes, str(tmp_path / "checkpoint"), devices=2)
    command("export", tmp_path / "checkpoint", tmp_path / "again")
    _equal(_stored(tmp_path / "again"), _stored(tmp_path / "model"))
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == model.config.model_type


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(9)}, tmp_path / "model.safetensors")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:30])
    assert "model.safetensors is no whole" in "".join(command("inspect", tmp_path, fails=True).split("\n"))
