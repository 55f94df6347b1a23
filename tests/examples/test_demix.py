"""The example whose experts belong to sources: on one and two processes, and mixed where the source is unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.script import Run, run_in_workers

TINY = ("--hidden=32", "--layers=1", "--length=32", "--batch=8", "--steps=40", "--held-out=32", "--precision=64-true")
HOW = ("prose alone", "code alone", "halves", "posterior", "told")


def _texts(folder: Path) -> None:
    folder.mkdir()
    for number in range(60):
        words = " ".join(f"The {number + each} readers of a page know what it says." for each in range(8))
        lines = "\n".join(f"    x[{number}][{each}] = f({each}, y={number * each}) ** 2" for each in range(12))
        (folder / f"file{number}.py").write_text(f'"""{words}"""\n\ndef f_{number}(x, y):\n{lines}\n')


def _found(folder: Path, replicas: int) -> Run:
    found = run_in_workers("demix.py", folder, *TINY, "--data=texts", f"--replicas={replicas}", processes=replicas)
    assert found.code == 0, found.output
    return found


@pytest.mark.wide
def test_mixing_experts_by_posterior_lowers_perplexity_where_the_source_is_unknown(tmp_path: Path) -> None:
    _texts(tmp_path / "texts")
    found = _found(tmp_path, 2)
    perplexity = {how: found.number(how) for how in HOW}
    assert perplexity["posterior"] < perplexity["halves"] < min(perplexity["prose alone"], perplexity["code alone"])
    assert perplexity["told"] <= perplexity["posterior"]


@pytest.mark.wide
def test_a_source_on_each_replica_trains_as_in_one_process(tmp_path: Path) -> None:
    _texts(tmp_path / "texts")
    one, two = (_found(tmp_path, replicas) for replicas in (1, 2))
    for name in ("train loss", *HOW):
        assert one.number(name) == two.number(name)
