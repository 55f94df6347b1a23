"""Checkpoints in one file, which ``torch.load`` and plain Lightning read, and which checkpoint is the last one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import MegatronCheckpointIO
from tests.checkpoints.reshard_scenarios import Losses, Tied
from tests.checkpoints.single_file_scenarios import cannot_export, goes_on_from, searches, writes_files
from tests.checkpoints.test_files import PlainTied
from tests.harness import run_trainers


def test_a_single_file_of_any_layout_is_loaded_and_resumed_by_plain_lightning_and_at_other_layouts(
    tmp_path: Path,
) -> None:
    run_trainers(writes_files, str(tmp_path), (2, 1, 2), devices=4)
    kept = sorted(path.name for path in (tmp_path / "saves").iterdir())
    assert kept == ["last.ckpt", "step=2.ckpt"] and all((tmp_path / "saves" / name).is_file() for name in kept)
    file = torch.load(tmp_path / "saves" / "last.ckpt", weights_only=True)
    assert file["global_step"] == 2 and file["hyper_parameters"] == {"width": 12, "seed": 4}
    assert torch.equal(file["state_dict"]["head.weight"], file["state_dict"]["embedding.weight"])
    assert {len(state["exp_avg"].shape) for state in file["optimizer_states"][0]["state"].values()} == {1, 2}
    module = Tied.load_from_checkpoint(tmp_path / "saves" / "last.ckpt", map_location="cpu", weights_only=True)
    assert all(torch.equal(value, file["state_dict"][name]) for name, value in module.state_dict().items())

    warnings.filterwarnings("ignore", message="The dirpath has changed")
    saves = ModelCheckpoint(tmp_path / "plain", every_n_train_steps=1)
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", max_steps=4, callbacks=[saves, Losses()], **options)
    with pytest.warns(UserWarning, match="not resumable"):  # that is what plain Lightning can do
        trainer.fit(PlainTied(seed=6), ckpt_path=str(tmp_path / "saves" / "last.ckpt"), weights_only=True)
    assert trainer.global_step == 4

    same = [run_trainers(goes_on_from, str(tmp_path / kind), (2, 1, 2), devices=4)[0].value for kind in ("a.ckpt", "b")]
    assert same[0] == same[1] and len(same[0]) == 2  # the file and the directory of the same step, bit for bit
    alone = run_trainers(goes_on_from, str(tmp_path / "a.ckpt"), (1, 1, 1), devices=1)[0].value
    assert alone == pytest.approx(same[0], rel=1e-6)  # of float32


def test_a_single_file_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    for outcome in run_trainers(cannot_export, str(tmp_path), devices=2):
        assert "was not saved. rank 0: OSError: [Errno 28]" in outcome.value
    assert [path.name for path in tmp_path.iterdir()] == ["same.ckpt"]
    assert torch.load(tmp_path / "same.ckpt", weights_only=True)["global_step"] == 1


def test_single_files_are_not_written_in_the_background_nor_to_object_stores() -> None:
    with pytest.raises(ValueError, match="leave `async_save=True` out"):
        MegatronCheckpointIO(single_file=True, async_save=True)
    with pytest.raises(ValueError, match=r"memory:///a/b\.ckpt is on another"):
        MegatronCheckpointIO(single_file=True).save_checkpoint({"state_dict": {}}, "memory://a/b.ckpt")


@pytest.mark.wide
def test_the_last_checkpoint_is_one_that_was_saved_to_be_found(tmp_path: Path) -> None:
    for single in (False, True):
        found = run_trainers(searches, str(tmp_path / str(single)), single, devices=1)[0].value
        assert found == {
            "without save_last": "begins anew",
            "with save_last": "step 4",
            "newer without": "step 6",  # where there is a last one, whatever is newer counts
            "stopped by a signal": "step 2",
        }
