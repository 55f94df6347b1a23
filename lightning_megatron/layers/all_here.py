"""Whether every rank has all tokens of a pass, in layers whose tokens ranks share otherwise.

A generation calls layers with one token at a time, and an evaluation with batches of any length. Neither has gradients
that ranks would have to sum, so all of them may have each token. Between tensor ranks, what is outside of the regions
that they split is then computed on every rank, as without sequence parallelism::

    shared    norm, + : on s/t    [all-gather]  attention, MLP: local heads  [reduce-scatter]
    all here  norm, + : on s                    attention, MLP: local heads  [all-reduce]

Context ranks all have each token in a generation, and share those of any other pass, as they need no equal parts.

Each thread has an answer of its own, as passes of several batches take turns on threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class _Passes(threading.local):
    """State of a thread.

    Attributes:
        asked: how many callers have asked for all tokens.
        uneven: whether tensor ranks cannot share the tokens of the pass under way evenly.
        aside: whether its graph is looked at, and no gradient is taken.
    """

    asked = 0
    uneven = False
    aside = False


_PASSES = _Passes()


def takes_gradients() -> bool:
    """Whether the pass of this thread may have a backward."""
    return torch.is_grad_enabled() and not _PASSES.aside


@contextmanager
def no_backward() -> Iterator[None]:
    """Around a pass of which only the graph is looked at."""
    before, _PASSES.aside = _PASSES.aside, True
    try:
        yield
    finally:
        _PASSES.aside = before


def all_tokens_asked() -> bool:
    """Whether the pass of this thread is to have all tokens on every rank."""
    return _PASSES.asked > 0


def all_tokens_here() -> bool:
    """Whether tensor ranks do not share tokens in the pass of this thread, which has no gradients then."""
    if torch.compiler.is_compiling():
        return not torch.is_grad_enabled() and _eagerly()
    return not takes_gradients() and _here()


@contextmanager
def all_tokens() -> Iterator[None]:
    """Around passes without gradients that have all tokens on every rank."""
    _PASSES.asked += 1
    try:
        yield
    finally:
        _PASSES.asked -= 1


def _here() -> bool:
    return _PASSES.asked > 0 or _PASSES.uneven


_eagerly: Callable[[], bool] = torch.compiler.disable(_here)
"""Outside the graph of a compiled layer, which would keep the first answer."""


def begin_pass(*, uneven: bool) -> None:
    """The first layer is about to run.

    Args:
        uneven: whether tensor ranks cannot share its tokens evenly, and need not.
    """
    _PASSES.uneven = uneven


def end_pass() -> None:
    """The last layer has run."""
    _PASSES.uneven = False
