"""Any layout loads what any other saved: every tensor bit for bit, and training goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints.reshard_scenarios import END, SAVED, Grid, first_run, second_run, tensors_of
from tests.harness import run_trainers

GRIDS = {
    "one": Grid(),
    "t2": Grid(tensor=2),
    "t3": Grid(tensor=3),
    "p2": Grid(pipeline=2),
    "p4": Grid(pipeline=4),
    "c2": Grid(context=2),
    "c3": Grid(context=3),
    "d2c2": Grid(data=2, context=2),
    "p2c2": Grid(pipeline=2, context=2),
    "d2": Grid(data=2),
    "d3": Grid(data=3),
    "t2p2": Grid(tensor=2, pipeline=2),
    "t2d2": Grid(tensor=2, data=2),
    "t2sp": Grid(tensor=2, options={"sequence_parallel": True}),
    "t3sp p2": Grid(tensor=3, pipeline=2, options={"sequence_parallel": True}),
    "p2v2": Grid(pipeline=2, chunks=2),
    "p2v2 t2": Grid(tensor=2, pipeline=2, chunks=2),
    "p2d2": Grid(pipeline=2, data=2),
    "d2 whole": Grid(data=2, options={"optimizer_sharding": False}),
    "d4 in twos": Grid(data=4, options={"optimizer_sharding": {"shard": 2}}),
    "bf16 d2": Grid(data=2, precision="bf16-mixed"),
    "bf16 t2p2": Grid(tensor=2, pipeline=2, precision="bf16-mixed"),
    "bf16 d3": Grid(data=3, precision="bf16-mixed"),
    "d2 spread": Grid(data=2, options={"weight_sharding": True}),
    "p2d2 spread": Grid(pipeline=2, data=2, options={"weight_sharding": True}),
    "zb-v": Grid(pipeline=2, options={"pipeline_schedule": "zb-v"}),
}
PAIRS = [
    ("one", "p2"),
    ("one", "t3"),
    ("t2", "p2v2"),
    ("t3", "t2p2"),
    ("p2", "one"),
    ("p4", "t2d2"),
    ("d2", "d3"),
    ("d3", "p2d2"),
    ("t2p2", "t3"),
    ("t2d2", "p2v2 t2"),
    ("t2sp", "p2"),
    ("t3sp p2", "t2d2"),
    ("p2v2", "p4"),
    ("p2v2 t2", "t3sp p2"),
    ("p2d2", "t2sp"),
    ("zb-v", "t2"),
    ("d3", "d2 whole"),
    ("d2 whole", "d4 in twos"),
    ("d4 in twos", "t3sp p2"),
    ("one", "d2"),
    ("c2", "c3"),
    ("c3", "p2d2"),
    ("d2c2", "one"),
    ("t2", "c2"),
    ("one", "d2c2"),
    ("p2c2", "c3"),
    ("d2", "p2c2"),
    ("p2d2 spread", "t2d2"),
    ("d3", "p2d2 spread"),
    ("d2 spread", "one"),
]
DEFAULT = [("c2", "c3"), ("t2d2", "p2v2 t2"), ("d2", "d3"), ("one", "d2")]
ROWS = [pytest.param(*pair, id=" to ".join(pair), marks=() if pair in DEFAULT else pytest.mark.wide) for pair in PAIRS]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("first", "second"), ROWS)
def test_what_one_layout_saved_another_loads_bit_for_bit_and_trains_on(first: str, second: str, tmp_path: Path) -> None:
    check(GRIDS[first], GRIDS[second], tmp_path)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("first", "second"),
    [("bf16 d2", "bf16 t2p2"), pytest.param("bf16 t2p2", "bf16 d3", marks=pytest.mark.wide)],
)
def test_sixteen_bit_runs_keep_their_float32_weights(first: str, second: str, tmp_path: Path) -> None:
    check(GRIDS[first], GRIDS[second], tmp_path, tolerance=0.03)  # sums in 16 bits depend on the layout
    assert tensors_of(tmp_path / "saved.ckpt")["layers.0.mlp.0.weight"].dtype == torch.float32


def check(first: Grid, second: Grid, folder: Path, tolerance: float = 1e-9) -> None:
    """Runs the pair and compares tensors and losses."""
    undisturbed = run_trainers(first_run, first, str(folder), devices=first.ranks)[0].value
    resumed = [o.value for o in run_trainers(second_run, second, str(folder), devices=second.ranks)]
    saved, again = tensors_of(folder / "saved.ckpt"), tensors_of(folder / "again.ckpt")
    assert set(saved) == set(again)
    assert "head.weight" not in saved, "a tied weight is stored once"
    assert saved["embedding.weight"].shape == (101, 12)
    assert saved["optimizer.0.embedding.weight.exp_avg"].abs().sum() > 0
    for name, tensor in saved.items():
        assert torch.equal(tensor, again[name]), name
    assert len(undisturbed) == END
    for losses in resumed:
        assert losses == pytest.approx(undisturbed[SAVED:], rel=tolerance, abs=tolerance)
