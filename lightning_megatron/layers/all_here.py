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
    """What holds in a thread.

    Attributes:
        asked: how many callers have asked for all tokens.
        uneven: whether tensor ranks cannot share the tokens of the pass under way evenly.
    """

    asked = 0
    uneven = False


_PASSES = _Passes()


def all_tokens_asked() -> bool:
    """Whether the pass of this thread is to have all tokens on every rank."""
    return _PASSES.asked > 0


def all_tokens_here() -> bool:
    """Whether tensor ranks do not share tokens in the pass of this thread, which has no gradients then."""
    if torch.is_grad_enabled():
        return False
    return _eagerly() if torch.compiler.is_compiling() else _here()


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
