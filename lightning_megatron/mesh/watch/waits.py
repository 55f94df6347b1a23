"""Waits of this process, said by the few calls that block.

A rank that hangs says nothing, so whoever looks at it from outside (the thread of ``mesh.watch.hang``, or whoever
handles an exception) has to learn what it was waiting for and for whom. The calls that block say so while they block::

    with waits.within(...)          computation of the forward pass of micro-batch 3, virtual stage 1
        with waits.on(...)          `all_reduce` of 2×8×12 float64 over ranks 0, 1 (tensor_parallel)
            with waits.on(...)      messages of 2×8×12 float64 among ranks 0, 1 (tensor_parallel)

A step enters hundreds of these, so entering one stores a function and its arguments, and words are made only when
somebody asks. The register belongs to the process and not to a thread, because autograd runs backward passes, and the
collectives in them, on threads of its own.

An exception that leaves ``waits.on`` is marked: it may be the echo of another rank's failure, which closed a connection
that this rank waited on. Whatever is raised elsewhere began here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

_PARTS = 4
_MARK = "_raised_while_waiting"


@dataclass(frozen=True)
class Waiting:
    """A wait: for what, and for which ranks.

    Attributes:
        what: in words.
        ranks: global ranks that have to take part; empty where that is not known.
    """

    what: str
    ranks: tuple[int, ...] = ()

    def after(self, what: str) -> Waiting:
        """The same, for the sake of something that is named first."""
        return Waiting(f"{what}: {self.what}", self.ranks)


class within:
    """Says what the body is about; the body waits only where it enters :class:`on`.

    Args:
        tell: makes a :class:`Waiting` of ``about``, or ``None``; called from another thread, if at all.
        about: what it is about.
    """

    __slots__ = ("_about", "_tell")
    blocks = False

    def __init__(self, tell: Callable[..., Waiting | None], *about: Any) -> None:
        self._tell = tell
        self._about = about

    def __enter__(self) -> None:
        _entered.append(self)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        _entered.remove(self)

    def told(self) -> Waiting | None:
        """The subject, in words."""
        return self._tell(*self._about)


class on(within):
    """Says that the body blocks until other ranks have done their part; arguments as of :class:`within`."""

    __slots__ = ()
    blocks = True

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        _entered.remove(self)
        if error is not None:
            mark(error)


_entered: list[within] = []


def waiting(call: str = "") -> Waiting | None:
    """The waits that this process is in, from the outermost to the innermost; ``None`` if it does not wait.

    Args:
        call: one that blocks without saying so itself; told only if nobody here says what blocks.
    """
    entered = list(_entered)
    said = any(each.blocks for each in entered)
    if not call and not said:
        return None
    told = [call] if call and not said else []
    ranks: tuple[int, ...] = ()
    for each in reversed(entered):
        found = each.told()
        if found is None or found.what in told:
            continue
        told.append(found.what)
        ranks = ranks or found.ranks
    return Waiting(": ".join(reversed(told[:_PARTS])), ranks)


def mark(error: BaseException) -> None:
    """Say that ``error`` may be the echo of another rank's failure, as of what leaves :class:`on`."""
    setattr(error, _MARK, True)


def interrupted(error: BaseException) -> bool:
    """Whether ``error`` was raised inside :class:`on`."""
    return hasattr(error, _MARK)


def collective(name: str, operand: Tensor | None, group: dist.ProcessGroup | None) -> Waiting:
    """A collective of ``group``: ```all_reduce` of 3×4 float32 over ranks 0, 1 (data_parallel)``."""
    of = f" of {numbers(operand)}" if operand is not None else ""
    return Waiting(f"`{name}`{of} over {members(group)}", ranks_of(group))


def ranks_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Global ranks of a group; of all for ``None``."""
    return tuple(dist.get_process_group_ranks(group or dist.group.WORLD))


def members(group: dist.ProcessGroup | None) -> str:
    """``ranks 0, 1 (data_parallel)``."""
    ranks = ranks_of(group)
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    axis = getattr(group, "group_desc", "").removeprefix("mesh_")
    return f"ranks {shown}" + (f" ({axis})" if axis.endswith("_parallel") else "")


def numbers(tensor: Tensor) -> str:
    """``3×4 float32``."""
    return f"{'×'.join(map(str, tensor.shape)) or '1'} {str(tensor.dtype).removeprefix('torch.')}"
