"""The same random numbers for a sample, whichever part of a batch it is in.

Whether the loss of a batch is a mean of the losses of its parts can be seen from numbers only if dropout masks, noise
and whatever else a step draws are those of the parts. So what the steps of two parts draw is noted, and the step of
both together gets it again, joined::

    part 0      bernoulli_ ──▶ mask [2, 8]  ┐
    part 1      bernoulli_ ──▶ mask [3, 8]  ┴──▶  both   bernoulli_ ──▶ mask [5, 8]

    part 0      rand ──▶ coin []            ┐
    part 1      rand ──▶ coin []            ┴──▶  both   rand ──▶ coin []      drawn for the batch

Some draws are no one's to join: an order of the samples, and what a generator gives that the step itself has seeded, or
that is the user's. For every sample these are other numbers in a batch than in its parts, where each begins anew::

    part 0      randn(2, generator=seeded)  ──▶ a b  ┐
    part 1      randn(2, generator=seeded)  ──▶ a b  ┴──▶  both   ──▶ a b c d    apart
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_megatron.mesh.draws.batch_draws import Draw, Place, SeenDraws
from lightning_megatron.mesh.other_generators import OtherDraws, states_of_others
from lightning_megatron.mesh.torch_functions import OperatorWatch, Run

_PERMUTES = "aten::randperm"  # of two parts joined it is no permutation
_ORDER = "an order of the samples (`torch.randperm`)"
_OWN = "from a generator of its own (`generator=`) for every sample"
_SEEDED = "from torch's generator, which it seeds itself, for every sample"
_OTHERS = "from Python's or NumPy's generator for every sample"
_DROPOUT = "aten::native_dropout"
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (Tensor, nn.Parameter)


class Drawn(NamedTuple):
    """A rank's message about the draws of a trial; see :class:`SameDraws`."""

    narrow: bool
    apart: str
    of_batch: frozenset[Draw]
    places: frozenset[Place]
    others: bool


class SameDraws:
    """The draws of steps on parts of a batch, in their order.

    Args:
        joins: number of a run -> the earlier runs whose samples it has, one after the other.

        is_foreign: whether a seed of torch's generators is none that this package has given.
        others: lines that may draw from Python's and NumPy's generators.

    Attributes:
        narrow: whether anything was computed in a type narrower than float64.
        any: whether anything was drawn.
        others: whether anything was drawn from Python's or NumPy's generator.
        apart: what is drawn for every sample and is another number in a part than in the whole; or "".
        of_batch: what is drawn for a batch, the same in a part and in the whole.
    """

    def __init__(
        self,
        joins: Mapping[int, tuple[int, ...]],
        is_foreign: Callable[[int], bool] = lambda _: False,
        others: OtherDraws | None = None,
    ) -> None:
        self.narrow, self.apart, self.any, self.others = False, "", False, False
        self._is_foreign, self._lines = is_foreign, others or OtherDraws()
        self._own: dict[tuple[int, int], list[Tensor]] = {}
        self._others: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._joins = joins
        self._latest = {part: run for run in sorted(joins) for part in joins[run]}
        self.of_batch: set[Draw] = set()
        self._places: set[Place] = set()
        self._seen: dict[tuple[int, int], Counter[Draw]] = {}
        self._calls: Counter[int] = Counter()
        self._drawn: dict[tuple[int, int], list[Tensor]] = {}

    def told(self) -> Drawn:
        """Message for the other ranks."""
        return Drawn(self.narrow, self.apart, frozenset(self.of_batch), frozenset(self._places), self.others)

    @contextmanager
    def run(self, index: int) -> Iterator[None]:
        """Around each run of a step, numbered ``index``, once per piece of the module."""
        call = self._calls[index]
        self._calls[index] += 1
        own: list[tuple[str, Tensor]] = []
        begun = states_of_others()
        if index not in self._joins:
            noted: list[Tensor] = []
            self._drawn[index, call] = noted
            take: Callable[[Tensor], Tensor] = lambda drawn: noted.append(drawn.clone()) or drawn  # type: ignore[func-returns-value]  # noqa: E731
        else:
            drawn = [self._drawn.get((part, call), []) for part in self._joins[index]]
            rows = iter(zip(*drawn, strict=False))
            take = lambda drawn: _given(next(rows, ()), drawn)  # noqa: E731
        try:
            draws = _Draws(take, lambda name, drawn: own.append((name, drawn.clone())), self._is_foreign)
            with self._seeing(draws), SeenDraws() as seen, self._lines.noting(seen.note):
                self._seen[index, call] = seen.counts
                yield
        finally:  # a stage ends its run by raising
            others = begun, states_of_others()
            self.others |= others[0] != others[1]
            self.any |= self.others
            self._compare(index, call, own, others)

    def _compare(self, index: int, call: int, own: list[tuple[str, Tensor]], others: tuple[Any, Any]) -> None:
        """Look whether a run has drawn what the parts of its batch have drawn, as far as nothing was joined."""
        self._own[index, call], self._others[index, call] = [drawn for _, drawn in own], others
        if index not in self._joins:
            return
        parts = [(part, call) for part in self._joins[index] if (part, call) in self._own]
        whole = self._seen.get((index, call), Counter())
        self._places.update(place for place, _ in whole)
        self.of_batch.update(
            draw
            for draw, count in whole.items()
            if count and parts and all(self._seen[part][draw] == count for part in parts)
        )
        for (name, drawn), *rows in zip(own, *(self._own[part] for part in parts), strict=False):
            both = _joined(tuple(rows), drawn)
            if both is not drawn and not torch.equal(both, drawn):
                self.apart = self.apart or name
        for part in parts:
            alike = self._others[part][0] == others[0]
            if alike and self._others[part][1] != others[1]:
                self.apart = self.apart or _OTHERS
        for done in self._joins[index]:
            if self._latest[done] == index:
                self._drawn.pop((done, call), None)
                self._own.pop((done, call), None)
                self._seen.pop((done, call), None)
                self._others.pop((done, call), None)

    @contextmanager
    def _seeing(self, draws: _Draws) -> Iterator[None]:
        try:
            with draws:
                yield
        finally:  # a stage ends its run by raising
            self.narrow |= draws.narrow
            self.any |= draws.any


def _joined(parts: tuple[Tensor, ...], own: Tensor) -> Tensor:
    """The draws of the parts, one after the other, if they make up a tensor like ``own``; or else ``own``."""
    if not parts or any(part.ndim != own.ndim or part.dtype != own.dtype for part in parts):
        return own
    for dim in range(own.ndim):
        rest = [(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts]
        fits = all(shape == (*own.shape[:dim], *own.shape[dim + 1 :]) for shape in rest)
        if fits and sum(part.shape[dim] for part in parts) == own.shape[dim]:
            return torch.cat(parts, dim)
    return own


def _given(parts: tuple[Tensor, ...], own: Tensor) -> Tensor:
    """Numbers that the whole gets for ``own``: what all parts have drawn for the batch, or theirs joined."""
    if parts and all(part.shape == own.shape and torch.equal(part, parts[0]) for part in parts):
        return parts[0].to(own.dtype, copy=True)
    return _joined(parts, own)


class _Draws(OperatorWatch):
    """Lets ``take`` see, and change, every tensor of random numbers; ``look`` sees those that cannot be changed."""

    def __init__(
        self,
        take: Callable[[Tensor], Tensor],
        look: Callable[[str, Tensor], None],
        is_foreign: Callable[[int], bool],
    ) -> None:
        self._take, self._look, self._is_foreign, self.narrow, self.any = take, look, is_foreign, False, False

    def seen(self, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of an operator; of a draw, what ``take`` makes of it."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            output = run(func, args, kwargs)
            if type(output) in _PLAIN and output.dtype in _NARROW:
                self.narrow = True
            return output
        names = [argument.name for argument in func._schema.arguments]
        if "dropout_p" in names:  # attention, whose mask nobody sees: none for the parts, and none for the whole
            place = names.index("dropout_p")
            self.any |= bool(kwargs.get("dropout_p") or (args[place] if place < len(args) else 0))
            args = tuple(0.0 if at == place else value for at, value in enumerate(args))
            return run(func, args, {**kwargs, **({"dropout_p": 0.0} if "dropout_p" in kwargs else {})})
        output, name = run(func, args, kwargs), func._schema.name
        self.any |= name != _DROPOUT or bool(args[1] and args[2])
        if how := self._not_joined(name, kwargs, output):
            for drawn in output if isinstance(output, tuple) else (output,):
                if type(drawn) is Tensor and not drawn.is_meta:
                    self._look(how, drawn)
            return output
        if name == _DROPOUT and type(output[1]) is Tensor and args[2]:
            mask = self._take(output[1])
            return args[0] * mask / (1 - args[1]) if args[1] < 1 else output[0], mask
        if type(output) is not Tensor or output.is_meta:
            return output
        drawn = self._take(output)
        if drawn is output:
            return output
        return output.copy_(drawn) if name.endswith("_") else drawn

    def _not_joined(self, name: str, given: Mapping[str, Any], output: Any) -> str:
        """Why a draw is no one's to join; "" if it may be."""
        if given.get("generator") is not None:
            return _OWN
        if name == _PERMUTES:
            return _ORDER
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor) or first.is_meta:
            return ""
        on_gpu = first.device.type == "cuda"
        generator = torch.cuda.default_generators[first.device.index or 0] if on_gpu else torch.default_generator
        return _SEEDED if self._is_foreign(generator.initial_seed()) else ""
