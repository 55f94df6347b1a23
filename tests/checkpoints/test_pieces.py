"""Tensors held in pieces: what one layout saves, any other loads, bit for bit, and each element is written once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints.piece_scenarios import SHAPES, load, logical, save
from tests.harness import run_on_mesh

LAYOUTS = {"t1d1": (1, 1, False), "t2d2 flat": (2, 2, True), "t3d1": (3, 1, False), "t2d3 flat": (2, 3, True)}
LAYOUTS |= {"t3d2 flat": (3, 2, True), "t1d4 flat": (1, 4, True), "t2d2": (2, 2, False)}
PAIRS = [("t2d2 flat", other) for other in LAYOUTS] + [("t3d2 flat", "t2d3 flat"), ("t3d2 flat", "t1d1")]
PAIRS += [("t1d1", "t3d2 flat"), ("t2d2", "t1d4 flat"), ("t2d2", "t3d1"), ("t1d4 flat", "t2d2")]


DEFAULT = [("t2d2 flat", "t3d1"), ("t3d2 flat", "t2d3 flat"), ("t2d2", "t1d4 flat")]
ROWS = [pytest.param(*pair, id=" to ".join(pair), marks=() if pair in DEFAULT else pytest.mark.wide) for pair in PAIRS]


@pytest.mark.parametrize(("first", "second"), ROWS)
def test_pieces_saved_at_one_layout_load_at_another_bit_for_bit(first: str, second: str, tmp_path: Path) -> None:
    tensor, data, flat = LAYOUTS[first]
    sizes = run_on_mesh(save, str(tmp_path), flat, tensor=tensor, data=data)[0]
    written = sum(size for name, size in sizes.items() if name.endswith(".bin"))
    total = sum(logical(name).nbytes for name in SHAPES)
    boxes = (tmp_path / "index.json").read_text().count("rank-")
    assert total <= written < total + 64 * boxes, "each element is written once"
    tensor, data, flat = LAYOUTS[second]
    for wrong in run_on_mesh(load, str(tmp_path), flat, tensor=tensor, data=data):
        assert not wrong


def test_the_work_is_shared_among_replicas(tmp_path: Path) -> None:
    sizes = run_on_mesh(save, str(tmp_path), False, tensor=1, data=4)[0]
    assert sum(name.endswith(".bin") for name in sizes) == 4


def test_the_table_covers_uneven_pieces() -> None:
    assert SHAPES["vocabulary"][0] % 2 and torch.Size(SHAPES["norm"]).numel() % 2
