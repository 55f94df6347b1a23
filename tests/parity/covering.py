"""Tables in which every combination of a few settings occurs, without every combination of all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def covering_rows(columns: Sequence[Sequence[Any]], strength: int) -> list[tuple[Any, ...]]:
    """Rows in which any ``strength`` columns show all combinations of their values; greedy, always the same.

    Example:
        Three columns of two values at strength 2: four rows instead of eight.
    """
    places = [range(len(column)) for column in columns]
    groups = list(itertools.combinations(range(len(columns)), strength))
    wanted = [(group, values) for group in groups for values in itertools.product(*(places[at] for at in group))]
    bits = {combination: 1 << at for at, combination in enumerate(wanted)}
    candidates = [
        (row, sum(bits[group, tuple(row[at] for at in group)] for group in groups))
        for row in itertools.product(*places)
    ]
    missing, rows = (1 << len(wanted)) - 1, []
    while missing:
        row, shown = max(candidates, key=lambda candidate: (candidate[1] & missing).bit_count())
        missing &= ~shown
        rows.append(tuple(column[at] for column, at in zip(columns, row, strict=True)))
    return rows
