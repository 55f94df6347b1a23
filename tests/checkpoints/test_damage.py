"""Loading reads checksums along: what is not what was written is refused before a step is taken with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron import MegatronCheckpointIO, load_hf_weights
from lightning_megatron.checkpoints.files.checksums import checksum
from lightning_megatron.checkpoints.files.directory import DamagedCheckpointError, IncompleteCheckpointError
from lightning_megatron.checkpoints.files.importing import import_checkpoint
from lightning_megatron.checkpoints.files.sources import load_whole, open_source
from lightning_megatron.mesh.parts.pieces import PiecedTensor
from tests.checkpoints.scenarios import resume_damaged
from tests.harness import run_trainers


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of two tensors."""
    torch.save({"state_dict": {"a": torch.arange(1000.0), "b": torch.ones(3)}}, tmp_path / "plain.ckpt")
    import_checkpoint(open_source(tmp_path / "plain.ckpt"), tmp_path / "run.ckpt")
    return tmp_path / "run.ckpt"


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x40
    path.write_bytes(content)


def read(path: Path, verify: bool = True) -> float:
    """Reads tensor ``b`` as a resumed run does; returns its sum."""
    io = MegatronCheckpointIO(verify=verify)
    io.load_checkpoint(path)
    kinds = io.tensor_kinds(path)
    into = {"b": ("b", PiecedTensor.whole(torch.zeros(kinds["b"][0])))}
    io.load_tensors(path, into)
    return float(into["b"][1].local.sum())


def test_one_flipped_bit_is_refused_even_in_a_tensor_that_is_not_wanted(saved: Path) -> None:
    assert read(saved) == 3.0
    flip(saved / "rank-00000.bin", 400)
    with pytest.raises(RuntimeError, match=r"rank-00000\.bin is damaged: checksum .* instead of"):
        read(saved)
    with pytest.raises(DamagedCheckpointError, match="damaged"):
        load_whole(saved)
    with pytest.raises(DamagedCheckpointError, match="damaged"):
        load_hf_weights(torch.nn.Linear(1, 1), saved)
    assert read(saved, verify=False) == 3.0


@pytest.mark.parametrize("name", ["meta.pt", "index.json", "about.json"])
def test_a_flipped_bit_in_a_small_file_is_refused_always(name: str, saved: Path) -> None:
    flip(saved / name, 30)
    with pytest.raises((RuntimeError, DamagedCheckpointError), match=f"{name} is damaged"):
        read(saved, verify=False) if name != "about.json" else open_source(saved)


def without_files(manifest: dict[str, Any]) -> None:
    manifest["files"] = {}


def without_the_tensors(manifest: dict[str, Any]) -> None:
    del manifest["files"]["rank-00000.bin"]


def with_a_file_outside(manifest: dict[str, Any]) -> None:
    manifest["files"]["../other.bin"] = manifest["files"]["rank-00000.bin"]


def of_another_form(manifest: dict[str, Any]) -> None:
    manifest["files"] = [1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_files, "does not list it"),
        (without_the_tensors, "does not list it"),
        (with_a_file_outside, "outside of the checkpoint"),
        (of_another_form, "not a valid list of files"),
    ],
)
def test_a_forged_manifest_is_refused(change: Callable[[dict[str, Any]], None], message: str, saved: Path) -> None:
    shutil.copy(saved / "rank-00000.bin", saved.parent / "other.bin")
    manifest = json.loads((saved / "manifest.json").read_text())
    change(manifest)
    content = json.dumps(manifest).encode()
    (saved / "manifest.json").write_bytes(content)
    with pytest.raises(IncompleteCheckpointError, match="changed since"):
        read(saved)
    marker = json.loads((saved / "COMPLETE").read_text())
    (saved / "COMPLETE").write_text(json.dumps({**marker, "manifest_checksum": checksum(content)}))
    with pytest.raises((RuntimeError, DamagedCheckpointError), match=message):
        read(saved)


def test_a_marker_that_points_elsewhere_is_none(saved: Path) -> None:
    marker = json.loads((saved / "COMPLETE").read_text())
    (saved / "COMPLETE").write_text(json.dumps({**marker, "data": "../run.ckpt"}))
    with pytest.raises(IncompleteCheckpointError, match="no marker"):
        read(saved)


def test_no_rank_resumes_when_the_file_of_one_is_damaged() -> None:
    for outcome in run_trainers(resume_damaged, devices=2):
        assert "rank 1: DamagedCheckpointError" in outcome.value
