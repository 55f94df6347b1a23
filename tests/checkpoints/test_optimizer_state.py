"""Whatever an optimizer keeps of a parameter is saved, and comes back as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lightning_megatron.checkpoints.files.sources import load_plain
from lightning_megatron.checkpoints.state.stored import load_optimizer
from lightning_megatron.tools.commands.cli import app
from tests.checkpoints.optimizer_scenarios import losses_of
from tests.checkpoints.reshard_scenarios import SAVED, Grid
from tests.harness import run_trainers

WIDE = pytest.mark.wide
UNSHARED = {"optimizer_sharding": False}


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("counting", Grid(data=2), Grid(pipeline=2)),
        pytest.param("counting", Grid(pipeline=2), Grid(data=2), marks=WIDE),
        pytest.param("counting", Grid(tensor=2), Grid(tensor=2), marks=WIDE),
        pytest.param("nadam", Grid(data=2), Grid(data=2), marks=WIDE),
        pytest.param("nadam", Grid(pipeline=2), Grid(tensor=2), marks=WIDE),
        pytest.param("lbfgs", Grid(data=2, options=UNSHARED), Grid(data=2, options=UNSHARED), marks=WIDE),
        pytest.param("lbfgs", Grid(data=2, options=UNSHARED), Grid(), marks=WIDE),
        pytest.param("lbfgs", Grid(tensor=2), Grid(tensor=2), marks=WIDE),
        pytest.param("lbfgs", Grid(tensor=2), Grid(), marks=WIDE),
        pytest.param("lbfgs", Grid(), Grid(data=2, tensor=2), marks=WIDE),
        pytest.param("coupled", Grid(tensor=2), Grid(tensor=2), marks=WIDE),
        pytest.param("coupled", Grid(tensor=2), Grid(data=2), marks=WIDE),
        pytest.param("coupled", Grid(), Grid(tensor=4), marks=WIDE),
    ],
)
def test_counts_lists_and_values_of_other_types_come_back(kind: str, first: Grid, second: Grid, tmp_path: Path) -> None:
    path = str(tmp_path / "run.ckpt")
    whole = run_trainers(losses_of, kind, first, path, False, devices=first.ranks)[0].value
    rest = run_trainers(losses_of, kind, second, path, True, devices=second.ranks)[0].value
    assert len(rest) == len(whole) - SAVED
    if first == second:
        assert rest == whole[SAVED:]
    else:
        assert rest == pytest.approx(whole[SAVED:], rel=1e-9)


def test_the_state_of_another_optimizer_is_refused_with_what_it_lacks() -> None:
    module = torch.nn.Linear(2, 2)
    names = [["weight", "bias"]]
    adam, sgd = torch.optim.AdamW(module.parameters()), torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    saved = {"state": {}, "param_groups": [{**adam.state_dict()["param_groups"][0], "params": names[0]}]}
    load_optimizer(adam, names, [], saved)
    with pytest.raises(
        ValueError, match=r"has no momentum, dampening, which SGD needs, but .*betas.*load_optimizer=False"
    ):
        load_optimizer(sgd, names, [], saved)


@pytest.mark.parametrize(("content", "found"), [(b"", "it is empty"), (b"\x13random bytes", "it begins with b'")])
def test_what_is_no_checkpoint_is_said_to_be_none(content: bytes, found: str) -> None:
    for trust in (False, True):
        with pytest.raises(RuntimeError, match=f"last.ckpt is not a checkpoint: {found}"):
            load_plain(content, "last.ckpt", trust)


@WIDE
def test_counts_go_through_an_exported_file(tmp_path: Path) -> None:
    path, grid = str(tmp_path / "run.ckpt"), Grid(data=2)
    whole = run_trainers(losses_of, "counting", grid, path, False, devices=2)[0].value
    for arguments in (
        ["export", path, tmp_path / "plain.ckpt"],
        ["import", tmp_path / "plain.ckpt", tmp_path / "back.ckpt"],
    ):
        result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
        assert result.exit_code == 0, result.output
    plain = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    states = plain["optimizer_states"][0]["state"]
    assert len(states) > 10 and all(state == {"count": SAVED, "last": [1, 2, 3]} for state in states.values())
    result = CliRunner().invoke(
        app, ["checkpoint", "export", str(tmp_path / "back.ckpt"), str(tmp_path / "again.ckpt")]
    )
    assert result.exit_code == 0, result.output
    again = torch.load(tmp_path / "again.ckpt", weights_only=True)
    assert again["optimizer_states"] == plain["optimizer_states"]
    for name in ("plain.ckpt", "back.ckpt"):
        rest = run_trainers(losses_of, "counting", grid, str(tmp_path / name), True, devices=2)[0].value
        assert rest == pytest.approx(whole[SAVED:], rel=1e-9), name
