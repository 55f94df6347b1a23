"""One message per failure: what a rank prints that only ends because of another one.

An exception that is the echo of another rank's failure is still raised, so that a caller can handle it. If nobody does,
its traceback (of a receive whose connection broke, say) would be printed on every rank, under the one that matters. So
where such an exception ends the interpreter, the message is printed that was chosen for it, which is none on the ranks
that share a terminal with one that speaks.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import torch.distributed as dist

from lightning_megatron.mesh.parts.packages import comes_from
from lightning_megatron.mesh.watch import waits

_MARK = "_said_instead"


class RemoteFailure(RuntimeError):
    """Raised on a rank that had to stop because another one failed; the message carries the other's traceback."""


def is_echo(error: BaseException) -> bool:
    """Whether ``error`` may be the echo of another rank's failure: a connection that broke, or was silent for too long.

    Such an error was raised while this rank waited for others: in one of our own calls, which say that they wait, or in
    a call of ``torch.distributed`` that a user's code made. Everything else began on this rank.
    """
    if isinstance(error, RemoteFailure) or not isinstance(error, (RuntimeError, ConnectionError)):
        return False
    if isinstance(error, dist.DistError) or waits.interrupted(error) or _raised_by_torch(error):
        return True
    return error.__cause__ is not None and is_echo(error.__cause__)


def _raised_by_torch(error: BaseException) -> bool:
    """Whether it was raised inside of ``torch.distributed``."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    return innermost is not None and comes_from(innermost.tb_frame, "torch.distributed")


def say_instead(error: BaseException, message: str) -> None:
    """If ``error`` ends the interpreter, print ``message`` in the place of its traceback; nothing if it is empty."""
    setattr(error, _MARK, message)


def be_brief_about_echoes() -> None:
    """Let this process print the messages of :func:`say_instead`; other exceptions are printed as before."""
    if not isinstance(sys.excepthook, _Brief):
        sys.excepthook = _Brief(sys.excepthook)


class _Brief:
    """Stands for ``sys.excepthook``.

    Args:
        usual: the hook that was there.
    """

    def __init__(self, usual: Any) -> None:
        self._usual = usual

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        message = getattr(error, _MARK, None)
        if message is None:
            self._usual(kind, error, trace)
        elif message:
            print(message, file=sys.stderr, flush=True)
