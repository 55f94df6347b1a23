"""The same random numbers for a sample, whichever part of a batch it is in.

Whether the loss of a batch is a mean of the losses of its parts can be seen from numbers only if dropout masks, noise
and whatever else a step draws are those of the parts. So what the steps of two parts draw is noted, and the step of
both together gets it again, joined::

    part 0      bernoulli_ ──▶ mask [2, 8]  ┐
    part 1      bernoulli_ ──▶ mask [3, 8]  ┴──▶  both   bernoulli_ ──▶ mask [5, 8]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_PERMUTES = "aten::randperm"  # of two parts joined it is no permutation
_DROPOUT = "aten::native_dropout"
_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class SameDraws:
    """What the steps of some parts of a batch draw, in the order in which they draw it.

    Args:
        joins: number of a run -> the earlier runs whose samples it has, one behind the other.

    Attributes:
        narrow: whether anything was computed in a type narrower than float64.
    """

    def __init__(self, joins: Mapping[int, tuple[int, ...]]) -> None:
        self.narrow = False
        self._joins = joins
        self._latest = {part: run for run in sorted(joins) for part in joins[run]}
        self._calls: Counter[int] = Counter()
        self._drawn: dict[tuple[int, int], list[Tensor]] = {}

    @contextmanager
    def run(self, index: int) -> Iterator[None]:
        """Around each run of a step, numbered ``index``, once per piece of the module."""
        call = self._calls[index]
        self._calls[index] += 1
        if index not in self._joins:
            noted: list[Tensor] = []
            self._drawn[index, call] = noted
            with self._seeing(_Draws(lambda own: noted.append(own.clone()) or own)):  # type: ignore[func-returns-value]
                yield
            return
        drawn = [self._drawn.get((part, call), []) for part in self._joins[index]]
        for part in self._joins[index]:
            if self._latest[part] == index:
                self._drawn.pop((part, call), None)
        rows = iter(zip(*drawn, strict=False))
        with self._seeing(_Draws(lambda own: _joined(next(rows, ()), own))):
            yield

    @contextmanager
    def _seeing(self, draws: _Draws) -> Iterator[None]:
        try:
            with draws:
                yield
        finally:  # a stage ends its run by raising
            self.narrow |= draws.narrow


def _joined(parts: tuple[Tensor, ...], own: Tensor) -> Tensor:
    """The draws of the parts, one behind the other, if they make up a tensor like ``own``; or else ``own``."""
    if not parts or any(part.ndim != own.ndim or part.dtype != own.dtype for part in parts):
        return own
    for dim in range(own.ndim):
        rest = [(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts]
        fits = all(shape == (*own.shape[:dim], *own.shape[dim + 1 :]) for shape in rest)
        if fits and sum(part.shape[dim] for part in parts) == own.shape[dim]:
            return torch.cat(parts, dim)
    return own


class _Draws(TorchDispatchMode):
    """Lets ``take`` see, and change, every tensor of random numbers."""

    def __init__(self, take: Callable[[Tensor], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._take, self.narrow = take, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            output = func(*args, **given)
            if type(output) is Tensor and output.dtype in _NARROW:
                self.narrow = True
            return output
        names = [argument.name for argument in func._schema.arguments]
        if "dropout_p" in names:  # attention, whose mask nobody sees: none for the parts, and none for the whole
            place = names.index("dropout_p")
            args = tuple(0.0 if at == place else value for at, value in enumerate(args))
            return func(*args, **{**given, **({"dropout_p": 0.0} if "dropout_p" in given else {})})
        output = func(*args, **given)
        name = func._schema.name
        if name == _DROPOUT and type(output[1]) is Tensor and args[2]:
            mask = self._take(output[1])
            return args[0] * mask / (1 - args[1]) if args[1] < 1 else output[0], mask
        if name == _PERMUTES or type(output) is not Tensor or output.is_meta:
            return output
        drawn = self._take(output)
        if drawn is output:
            return output
        return output.copy_(drawn) if name.endswith("_") else drawn
