"""What user code keeps of each weight by name is, where it is read, logged and saved, that of one process."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.strategy.saving.spelled_ways import spelled, unfolded
from tests.harness import run_trainers
from tests.parity.scenario import differences
from tests.strategy.kept_by_name_scenarios import kept

LAYOUTS: dict[str, tuple[tuple[int, int], dict[str, Any], int]] = {
    "pp2": ((2, 1), {}, 2),
    "zb-v": ((2, 1), {"pipeline_schedule": "zb-v"}, 2),
    "pp2xtp2": ((2, 1), {"tensor_parallel_size": 2}, 4),
    "pp2xdp2": ((2, 2), {}, 4),
    "pp3": ((3, 1), {}, 3),
}
SAVING = ["InTheModule", "OfAStage", "InAnObject", "OtherKeys", "OtherWays", "ByCallback"]
EVERY_DAY = {("InTheModule", "zb-v"), ("ByCallback", "pp2")}
ROWS = [
    pytest.param(kind, layout, marks=[] if (kind, layout) in EVERY_DAY else pytest.mark.wide)
    for kind in [*SAVING, "OneLayer"]
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("kind", "layout"), ROWS)
def test_averages_kept_by_name_are_logged_and_saved_whole(kind: str, layout: str, tmp_path: Path) -> None:
    (plain,) = run_trainers(kept, None, {}, kind, _folder(tmp_path, "plain"), devices=1)
    sizes, arguments, devices = LAYOUTS[layout]
    first, *others = run_trainers(kept, sizes, arguments, kind, _folder(tmp_path, layout), devices=devices)
    assert plain.value["saved"] and not list(differences("", first.value, plain.value, 1e-9))
    for other in others:
        expected = {what: plain.value[what] for what in other.value}
        assert not list(differences("", other.value, expected, 1e-9)), other.rank
    if kind == "OfAStage":
        files = [torch.load(tmp_path / run / "shadow.pt", weights_only=True) for run in (layout, "plain")]
        assert list(files[0]) == list(files[1])
        assert not list(differences("", *files, 1e-9))


@pytest.mark.wide
@pytest.mark.parametrize("kind", SAVING)
@pytest.mark.parametrize(("saves", "loads"), [("pp2", "pp2"), ("pp2xtp2", "zb-v"), ("zb-v", "plain"), ("pp2", "pp3")])
def test_a_resumed_run_goes_on_with_averages_kept_by_name(kind: str, saves: str, loads: str, tmp_path: Path) -> None:
    (plain,) = run_trainers(kept, None, {}, kind, _folder(tmp_path, "straight"), devices=1)
    folder = _folder(tmp_path, "run")
    sizes, arguments, devices = LAYOUTS[saves]
    run_trainers(kept, sizes, arguments, kind, folder, 1, devices=devices)
    sizes, arguments, devices = LAYOUTS.get(loads, ((1, 1), {}, 1))
    first = run_trainers(kept, sizes, arguments, kind, folder, 2, True, devices=devices)[0]
    assert not list(differences("", first.value, plain.value, 1e-9))


@pytest.mark.wide
def test_names_that_two_parts_of_a_model_have_are_kept_as_in_one_process(tmp_path: Path) -> None:
    (plain,) = run_trainers(kept, None, {}, "Twins", _folder(tmp_path, "plain"), devices=1)
    arguments = {"pipeline_layers": "layers"}
    first, _ = run_trainers(kept, (2, 1), arguments, "Twins", _folder(tmp_path, "run"), devices=2)
    assert plain.value["saved"] and not list(differences("", first.value, plain.value, 1e-9))


@pytest.mark.wide
def test_what_a_checkpoint_has_of_one_stage_only_is_named(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "run")
    first, _ = run_trainers(kept, (2, 1), {}, "ByNumber", folder, devices=2, check=False, grace=20.0)
    assert "`checkpoint['shadow'][" in str(first.error) and "is another tensor on each" in str(first.error), first.error


def test_ways_that_spell_names_are_folded_and_unfolded() -> None:
    table = OrderedDict({"head": {"weight": 1, "bias": {}}, "layers": {0: {"weight": 2}}})
    assert spelled(table, 0) == {
        "head.weight": (("head", "weight"), 1),
        "head.bias": (("head", "bias"), {}),
        "layers.0.weight": (("layers", 0, "weight"), 2),
    }
    again = unfolded(spelled(table, 0), table)
    assert again == table and type(again) is OrderedDict
    assert spelled({("head.weight", 0): 1, ("head.weight", 1): 2}, 1) == {}
    assert spelled({("head.weight", 0): 1}, 1) == {"head.weight": ((("head.weight", 0),), 1)}
    assert spelled({"head.weight": 1}, 0) == {} == spelled({"head": {1.5: 1}}, 0)


@pytest.mark.wide
def test_a_hook_that_updates_averages_and_writes_them_is_refused_before_the_first_step(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "run")
    for outcome in run_trainers(kept, (2, 1), {}, "WritesAtOnce", folder, devices=2, check=False, grace=20.0):
        said = str(outcome.error)
        assert "writes `shadow` into a file" in said and "kept_by_name_scenarios.py" in said, said


def _folder(path: Path, name: str) -> str:
    (path / name).mkdir()
    return str(path / name)
