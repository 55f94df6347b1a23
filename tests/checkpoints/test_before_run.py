"""What Lightning's own strategies save, and do not touch: a module before any run; the dictionary that hooks see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints.reshard_scenarios import Tied
from tests.checkpoints.scenarios import fresh_losses, kept_by_a_hook, resume_imported, saved_before
from tests.harness import run_trainers


@pytest.mark.wide
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_a_module_saved_before_any_run_begins_one_at_any_layout(devices: int, tmp_path: Path) -> None:
    path = str(tmp_path / "start.ckpt")
    run_trainers(saved_before, path, devices=devices)
    module = Tied.load_from_checkpoint(path)
    assert all(torch.equal(value, Tied(seed=9).state_dict()[name]) for name, value in module.state_dict().items())
    for sizes in ((1, 1, 1), (2, 1, 2)):
        world = torch.Size(sizes).numel()
        begun = run_trainers(resume_imported, path, sizes, devices=world)[0].value
        assert begun == run_trainers(fresh_losses, sizes, devices=world)[0].value and len(begun) == 4


def test_nothing_is_added_to_the_dictionary_that_hooks_are_shown(tmp_path: Path) -> None:
    (alone,) = run_trainers(kept_by_a_hook, str(tmp_path / "a.ckpt"), (1, 1, 1), devices=1)
    assert "state_dict" in alone.value and "lightning_megatron" not in alone.value
    for outcome in run_trainers(kept_by_a_hook, str(tmp_path / "b.ckpt"), (2, 1, 1), devices=2):
        assert outcome.value == alone.value
