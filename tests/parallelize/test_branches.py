"""Branches that a trial has not run, in the code that views an attention's tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_megatron.parallelize.trial.branches import LinesRun


def attend(x: Any, layer: Any, kind: str) -> Any:
    """Whatever lies between projections, with branches."""
    q = heads(x)
    if kind == "keeps":
        layer.kept = q
    if kind == "views":
        q = q.reshape(-1)
    if kind == "lists":
        layer.all.append(q)
    if kind == "returns":
        return x, q
    if kind == "computes":
        q = q + q @ q
    if kind == "raises":
        raise ValueError(q.view(-1))
    return q


def heads(x: Any) -> Any:
    """A function of its own."""
    return x.view(2, -1)


def plain(x: Any, kind: str) -> Any:
    """The same without a branch that keeps or views."""
    q = heads(x)
    if kind == "computes":
        return q @ q
    if kind == "raises":
        raise ValueError(f"{x.view(-1)}")
    return q


def one_of(x: Any, layer: Any, kind: str) -> Any:
    """One branch alone."""
    q = heads(x)
    if kind:
        layer.kept = q
    return q


class Viewed:
    """Something with views."""

    def view(self, *sizes: int) -> Viewed:
        """Itself."""
        return self


@pytest.mark.parametrize(
    ("run", "complete"),
    [
        (lambda: attend(Viewed(), SimpleNamespace(), ""), False),
        (lambda: plain(Viewed(), ""), True),
        (lambda: one_of(Viewed(), SimpleNamespace(), ""), False),
        (lambda: one_of(Viewed(), SimpleNamespace(), "kept"), True),
        (lambda: (one_of(Viewed(), SimpleNamespace(), "kept"), one_of(Viewed(), SimpleNamespace(), "")), True),
    ],
)
def test_a_branch_that_keeps_views_or_returns_split_tensors_has_to_run(run, complete):
    with LinesRun() as lines:
        run()
    assert lines.is_complete([heads.__code__], {"view", "reshape"}) is complete


def test_code_that_views_nothing_may_leave_out_branches():
    with LinesRun() as lines:
        one_of(Viewed(), SimpleNamespace(), "")
    assert lines.is_complete([plain.__code__], {"view"})
