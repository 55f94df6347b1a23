"""What messages about checkpoints advise, followed to the letter: it works."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from typer.testing import CliRunner

from lightning_megatron.checkpoints.files.directory import IncompleteCheckpointError, open_checkpoint
from lightning_megatron.checkpoints.files.importing import import_checkpoint
from lightning_megatron.checkpoints.files.sources import open_source
from lightning_megatron.tools.commands.cli import app
from tests.checkpoints.adapter_scenarios import Adapted, base_of, logits_of, trained
from tests.checkpoints.remedy_scenarios import MISFITS, keeps, resumes, writes
from tests.harness import run_trainers

WIDE = pytest.mark.wide


def said(*arguments: object) -> str:
    """What the command says, in one line; an error begins with ``Error``."""
    return " ".join(CliRunner().invoke(app, ["checkpoint", *map(str, arguments)]).output.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("remedies")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A checkpoint directory of three tensors, one of complex numbers."""
    state = {"a": torch.arange(9.0), "b": torch.ones(3), "c": torch.ones(2, dtype=torch.complex64)}
    torch.save({"state_dict": state}, tmp_path / "plain.ckpt")
    import_checkpoint(open_source(tmp_path / "plain.ckpt"), tmp_path / "run.ckpt")
    return tmp_path / "run.ckpt"


def test_an_incomplete_checkpoint_names_a_whole_one(plain: Path) -> None:
    torn = Path(shutil.copytree(plain, plain.with_name("torn.ckpt")))
    (torn / "COMPLETE").unlink()
    with pytest.raises(IncompleteCheckpointError, match="Use the newest complete one, ") as refused:
        open_checkpoint(torn)
    named = re.search(r"one, (\S+)\.$", str(refused.value))
    assert named is not None and float(open_source(named[1]).read("b").sum()) == 3.0
    (plain / "COMPLETE").unlink()
    with pytest.raises(IncompleteCheckpointError, match="there is no complete checkpoint beside it"):
        open_checkpoint(torn)


def test_a_path_beside_or_above_checkpoints_names_the_newest(plain: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"; the newest one beside it is {plain}"):
        open_checkpoint(plain.with_name("gone.ckpt"))
    with pytest.raises(IncompleteCheckpointError, match=f"a folder of checkpoints .* the newest is {plain}"):
        open_checkpoint(plain.parent)


def test_what_safetensors_cannot_hold_a_lightning_file_holds(plain: Path, tmp_path: Path) -> None:
    assert "`--format lightning` writes a file" in said("export", plain, tmp_path / "out", "--prefix", "")
    assert said("export", plain, tmp_path / "out.ckpt", "--format", "lightning").startswith("wrote")
    assert torch.load(tmp_path / "out.ckpt", weights_only=True)["state_dict"]["c"].is_complex()


MERGED_BY_PEFT = ["ia3", *(pytest.param(kind, marks=WIDE) for kind in ("vera", "norms", "some tokens"))]


@pytest.mark.parametrize("kind", MERGED_BY_PEFT)
def test_an_adapter_that_is_not_merged_here_is_merged_by_peft(kind: str, folder: Path, tmp_path: Path) -> None:
    path = trained(kind, folder, pipeline_parallel_size=1)
    assert "merge it with peft's `merge_and_unload`" in said("export", path, tmp_path / "a", "--merge-adapters")
    assert said("export", path, tmp_path / "a", "--format", "adapter").startswith("wrote")
    _like_the_module(kind, path, _loaded(kind, tmp_path / "a").merge_and_unload())


@pytest.mark.parametrize("kind", ["prompt", *(pytest.param(kind, marks=WIDE) for kind in ("p-tuning", "bias"))])
def test_an_adapter_that_no_weights_can_take_up_is_loaded_by_peft(kind: str, folder: Path, tmp_path: Path) -> None:
    path = trained(kind, folder, pipeline_parallel_size=1)
    advice = said("export", path, tmp_path / "a", "--merge-adapters")
    assert "load it with peft's `PeftModel`" in advice
    if "write it alone with `--format adapter`" in advice:
        assert said("export", path, tmp_path / "a", "--format", "adapter").startswith("wrote")
    else:
        module = Adapted.load_from_checkpoint(path, kind=kind)
        module.model.save_pretrained(tmp_path / "a")
    _like_the_module(kind, path, _loaded(kind, tmp_path / "a"))


def _loaded(kind: str, adapter: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(base_of(kind), str(adapter)).double()


def _like_the_module(kind: str, path: Path, model: Any) -> None:
    module = Adapted.load_from_checkpoint(path, kind=kind)
    torch.testing.assert_close(logits_of(model), logits_of(module.model), rtol=0, atol=1e-6)


OFTEN = ("other names", "a pickled object", "other batches")


@pytest.mark.everyday(1)
@pytest.mark.parametrize("misfit", [pytest.param(name, marks=() if name in OFTEN else WIDE) for name in MISFITS])
def test_a_run_that_cannot_be_resumed_is_resumed_as_it_is_told(misfit: str, tmp_path: Path) -> None:
    words, *_ = MISFITS[misfit]
    run_trainers(writes, misfit, str(tmp_path / "run.ckpt"), devices=2)
    for outcome in run_trainers(resumes, misfit, str(tmp_path / "run.ckpt"), False, devices=2, check=False, grace=20):
        assert outcome.error is not None and words in f"{outcome.error}\n{outcome.output}"
    found = [outcome.value for outcome in run_trainers(resumes, misfit, str(tmp_path / "run.ckpt"), True, devices=2)]
    assert found == [4, 4]  # steps, of which the last two are of this run


def test_tensors_that_an_export_cannot_find_are_left_out_with_their_callback(tmp_path: Path) -> None:
    run_trainers(keeps, str(tmp_path / "run.ckpt"), devices=1)
    advice = said("export", tmp_path / "run.ckpt", tmp_path / "out.ckpt")
    assert "or `--trust` on the command line" in advice
    advice = said("export", tmp_path / "run.ckpt", tmp_path / "out.ckpt", "--trust")
    assert "export with `--no-optimizer`" in advice and not (tmp_path / "out.ckpt").exists()
    assert said("export", tmp_path / "run.ckpt", tmp_path / "out.ckpt", "--trust", "--no-optimizer").startswith("wrote")
    assert "state_dict" in torch.load(tmp_path / "out.ckpt", weights_only=True)
