"""Every row of the exhaustive tables is in exactly one tenth, and the tenths are about as long as each other."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from tests.harness.tenths import TENTHS, leave_for_tenths, name_of, tenth_of
from tests.parity import table, tensor_rows, test_schedules
from tests.parity.row import Row

ROWS = [
    *(f"{row.reference}" for row in dict.fromkeys(table.everything())),
    *(f"tensor[{row}]" for row in dict.fromkeys(tensor_rows.everything())),
    *(f"schedules[{row}]" for row in test_schedules.wide_rows()),
]


def test_the_tenths_are_alike_and_leave_no_row_out() -> None:
    sizes = Counter(map(tenth_of, ROWS))
    assert sorted(sizes) == list(range(TENTHS)) and sizes.total() == len(ROWS) > 700
    assert max(sizes.values()) < 1.6 * len(ROWS) / TENTHS


def test_a_row_stays_in_its_tenth() -> None:
    assert [tenth_of(name) for name in ("a", "b", "tests/x.py::test[row]")] == [0, 6, 0]
    assert len({tenth_of(f"tests/x.py::test[<Bias object at 0x7f{end}>]") for end in ("3b", "dc", "00", "a1")}) == 1


def test_rows_that_share_a_run_in_one_process_are_in_one_tenth() -> None:
    rows = [Row("nanogpt", layout, "1f1b", "norm") for layout in ("pp2", "tp2")]
    together = pytest.mark.wide(together=lambda row: row.reference)
    items = [SimpleNamespace(nodeid=f"{row}", callspec=SimpleNamespace(params={"row": row})) for row in rows]
    for item in items:
        item.get_closest_marker = {"wide": together.mark}.get
    assert len({name_of(item) for item in items}) == 1 < len({item.nodeid for item in items})


class _Row(SimpleNamespace):
    """What the harness asks of a collected test."""

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.marks.append(marker.mark)


def test_rows_of_every_run_are_spread_over_their_table_and_the_others_are_wide() -> None:
    rows = [_Row(nodeid=f"test[{at}]", marks=[pytest.mark.everyday(3).mark]) for at in range(8)]
    wide = _Row(nodeid="test[8]", marks=[pytest.mark.everyday(3).mark, pytest.mark.wide.mark])
    others = [_Row(nodeid=f"other[{at}]", marks=[]) for at in range(3)]
    few = [_Row(nodeid="few[0]", marks=[pytest.mark.everyday(3).mark])]
    leave_for_tenths([*rows, wide, *others, *few])  # type: ignore[list-item]
    assert [at for at, row in enumerate(rows) if not row.get_closest_marker("wide")] == [0, 2, 5]
    assert not any(row.get_closest_marker("wide") for row in (*others, *few))
    assert sum(mark.name == "wide" for mark in wide.marks) == 1
