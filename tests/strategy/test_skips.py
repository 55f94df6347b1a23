"""Whether a step may return ``None`` is read in its source."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from lightning_megatron.strategy.loss.skips import may_return_none


class Steps:
    """Steps by name."""

    def plain(self, batch: Any) -> Any:
        def inside() -> None:
            return None

        inside()
        return batch

    def bare(self, batch: Any) -> Any:
        if batch:
            return
        return batch  # type: ignore[return-value]

    def said(self, batch: Any) -> Any:
        for sample in batch:
            if sample:
                return None
        return batch

    def chosen(self, batch: Any) -> Any:
        return batch if batch else None

    def runs_out(self, batch: Any) -> Any:
        if batch:
            return batch

    def both(self, batch: Any) -> Any:
        if batch:
            return batch
        elif batch is None:
            raise ValueError("no batch")
        else:
            return 1

    def within(self, batch: Any) -> Any:
        with contextlib.suppress(ValueError):
            return batch

    def caught(self, batch: Any) -> Any:
        try:
            return batch
        except ValueError:
            return None

    def tried(self, batch: Any) -> Any:
        try:
            return batch
        except ValueError:
            return 1

    def tried_in_part(self, batch: Any) -> Any:
        try:
            return batch
        except ValueError:
            self.failures = 1

    def looped(self, batch: Any) -> Any:
        for sample in batch:
            return sample

    def endless(self, batch: Any) -> Any:
        while True:
            if batch:
                return batch

    def matched(self, batch: Any) -> Any:
        match batch:
            case int():
                return batch
            case _:
                return 1

    def handed_on(self, batch: Any) -> Any:
        return self.caught(batch)

    def round_about(self, batch: Any) -> Any:
        return self.round_about(batch)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", False),
        ("bare", True),
        ("said", True),
        ("chosen", True),
        ("runs_out", True),
        ("both", False),
        ("within", False),
        ("caught", True),
        ("tried", False),
        ("tried_in_part", True),
        ("looped", True),
        ("endless", False),
        ("matched", False),
        ("handed_on", True),
        ("round_about", False),
    ],
)
def test_a_step_says_whether_it_may_return_none(name: str, expected: bool) -> None:
    step: Callable[..., Any] = getattr(Steps(), name)
    assert may_return_none(Steps(), step) is expected


def test_a_step_without_source_does_not() -> None:
    assert not may_return_none(Steps(), len)
