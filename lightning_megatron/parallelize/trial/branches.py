"""Finds branches, in the code that views an attention's split tensors, that a trial of it has not run.

A trial learns the sizes of the calls that it makes. A branch that it does not take may view split tensors as well, or
keep them where code finds them that knows the sizes of the model::

    if use_cache:                                   False in the trial
        self.kept = torch.cat([self.kept, k], 1)    heads of one rank, on the layer

Where there is such a branch, the attention cannot be split by what the trial has learned. One that only computes
(``y = a @ v`` in place of a fused attention) or ends in an error may be left out.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

from lightning_megatron.mesh.parts.packages import PACKAGE, package_of

_KEEPS = frozenset(("append", "extend", "insert", "add", "update", "setdefault", "copy_", "register_buffer"))
_STORES = frozenset(("STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_DEREF", "YIELD_VALUE"))
_PACKS = frozenset(("BUILD_TUPLE", "BUILD_LIST", "BUILD_MAP", "BUILD_CONST_KEY_MAP"))  # `return x, (k, v)`


class LinesRun:
    """Collects the lines of Python that run in a ``with`` statement, but torch's and this package's."""

    def __init__(self) -> None:
        self._lines: dict[CodeType, set[int]] = {}
        self._callers: dict[CodeType, set[CodeType]] = {}
        self._before: Any = None

    def __enter__(self) -> LinesRun:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if package_of(frame) in ("torch", PACKAGE):
            return None
        code, caller = frame.f_code, frame.f_back
        self._lines.setdefault(code, {code.co_firstlineno}).add(frame.f_lineno)
        while caller is not None and package_of(caller) in ("torch", PACKAGE):
            caller = caller.f_back
        if caller is not None:
            self._callers.setdefault(code, set()).add(caller.f_code)
        return self._ran

    def _ran(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        self._lines[frame.f_code].add(frame.f_lineno)
        return self._ran

    def is_complete(self, codes: Iterable[CodeType], names: Collection[str]) -> bool:
        """Whether no branch was left out that calls certain functions, or keeps or returns a value beside others.

        Args:
            codes: of functions; those that ran and call them, at any depth, are looked at as well.
            names: of the functions.
        """
        wanted, waiting = set[CodeType](), list(codes)
        while waiting:
            code = waiting.pop()
            if code in self._lines and code not in wanted:
                wanted.add(code)
                waiting += self._callers.get(code, ())
        return not any(_tells(branch, names) for code in wanted for branch in self._left_out(code))

    def _left_out(self, code: CodeType) -> Iterator[list[dis.Instruction]]:
        """Runs of instructions on lines that have not run."""
        ran, branch = self._lines[code], list[dis.Instruction]()
        for each in dis.get_instructions(code):
            line = each.positions.lineno if each.positions is not None else None
            if line is None or line in ran:
                if branch:
                    yield branch
                branch = []
            else:
                branch.append(each)
        if branch:
            yield branch


def _tells(branch: list[dis.Instruction], names: Collection[str]) -> bool:
    if branch[-1].opname == "RAISE_VARARGS":  # one in the midst of it may be passed by
        return False
    loads = {each.argval for each in branch if each.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL")}
    returns = any(one.opname in _PACKS and other.opname == "RETURN_VALUE" for one, other in pairwise(branch))
    return returns or not loads.isdisjoint({*names, *_KEEPS}) or any(each.opname in _STORES for each in branch)
