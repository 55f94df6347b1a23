"""The picture of a plan shows each weight with its parts, where they lie, and the collectives."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from lightning_megatron.parallelize import ParallelReport, explain
from lightning_megatron.parallelize.picture import MOST_ROWS, plan_picture, weight_parts
from lightning_megatron.parallelize.plan.row import ModuleRow


def _texts(picture: str) -> list[str]:
    root = ElementTree.fromstring(picture)
    return ["".join(text.itertext()).strip() for text in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize(
    ("style", "whole", "part", "expected"),
    [
        ("colwise", (8, 4), (4, 4), [(0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 0.5, 1.0)]),
        ("rowwise", (8, 4), (8, 2), [(0.0, 0.5, 1.0, 0.5), (0.0, 0.0, 1.0, 0.5)]),
        ("embedding_rowwise", (9, 4), (5, 4), [(0.0, 0.5, 1.0, 0.5), (0.0, 0.0, 1.0, 0.5)]),
        ("embedding_colwise", (9, 4), (9, 2), [(0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 0.5, 1.0)]),
        ("replicated", (8, 4), (8, 4), [(0.0, 0.0, 1.0, 1.0)]),
        ("gather", None, None, [(0.0, 0.0, 1.0, 1.0)]),
    ],
)
def test_columns_and_rows_of_a_weight_lie_where_its_ranks_have_them(
    style: str, whole: tuple[int, ...] | None, part: tuple[int, ...] | None, expected: list[tuple[float, ...]]
) -> None:
    parts = weight_parts(ModuleRow("layer", style, whole, part), 2)
    assert [one[:4] for one in parts] == expected
    assert len({one[4] for one in parts}) == len(expected)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def test_layers_that_are_alike_are_drawn_once_with_their_number() -> None:
    report = explain(nn.Sequential(*(nn.Sequential(_Block()) for _ in range(3))), 2)
    said = report.explain()
    texts = _texts(plan_picture(report))
    for row, count in report.grouped():
        assert f"{row.name} × {count}" in texts and row.name in said and f"x{count}" in said
        assert row.style in texts and "×".join(map(str, row.global_shape or ())) in texts
    assert {"module", "forward", "backward", "all-reduce"} <= set(texts)
    apart = _texts(plan_picture(report, every_layer=True))
    assert {row.name for row in report.rows} <= set(apart) and len(apart) > len(texts)


def test_a_long_plan_says_how_much_of_it_is_not_drawn() -> None:
    rows = [ModuleRow(f"part{number}.linear{number}x", "colwise", (8, 4), (4, 4)) for number in range(MOST_ROWS + 7)]
    report = ParallelReport("rules", 2, rows=rows)
    assert "and 7 more" in _texts(plan_picture(report, every_layer=True))
