"""The example of a long sequence, short: it trains over context ranks, and draws what a rank keeps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.script import run_in_workers

TINY = ("--tokens=64", "--first=2", "--steps=1")


@pytest.mark.parametrize("method", ["gather", pytest.param("ring", marks=pytest.mark.wide)])
def test_needles_are_counted_and_more_ranks_keep_less_each(tmp_path: Path, method: str) -> None:
    pytest.importorskip("matplotlib")
    found = run_in_workers("long_context.py", tmp_path, *TINY, f"--method={method}", processes=2)
    assert found.code == 0, found.output
    assert found.number("tokens") == 64 and 0 <= found.number("needles found") <= 1
    rows = re.findall(r"^(\d) ranks keep +[\d.]+ MiB each, ([\d.]+)", found.output, re.MULTILINE)
    shares = {int(ranks): float(share) for ranks, share in rows}
    assert list(shares) == [1, 2, 4, 8], found.output
    for ranks, share in shares.items():
        assert share < 1.1 / ranks, (ranks, share)
    assert (tmp_path / "runs" / "long_context" / "memory.png").read_bytes().startswith(b"\x89PNG")
