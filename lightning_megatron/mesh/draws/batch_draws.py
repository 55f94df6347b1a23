"""What a step draws for a batch, and not for each sample, drawn once for all of its micro-batches.

A coin (``if torch.rand(()) < 0.5``), a time for all samples or the mask of a position table is one for the batch in one
process. Micro-batches draw from streams of their own, where each would toss its own. A trial shows which draws have the
same shape in a part of a batch and in the whole (:mod:`~lightning_megatron.mesh.draws.same_draws`); these are taken
from streams that all micro-batches share::

    stream of micro-batch 0     key a ── mask ──              key a, key b: name the draw, so that what restores the
    stream of micro-batch 1     key b ── mask ──              stream, as recomputation does, repeats it
    stream of the batch         coin ─────────────            of segment and number of the draw in it

A draw is known again by the line of the user's code, the function, and the shape. Backwards are taken over to run under
the mode as well, as code in them is computed again.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_megatron.mesh.draws.answers import RUN_CODE, body_of
from lightning_megatron.mesh.draws.functions import ANSWERS
from lightning_megatron.mesh.draws.mode import line_that_draws

Shape = tuple[int, ...]
Place = tuple[str, str, Shape | None]
"""Line of the user's code, name of the function, and shape of the tensor that it is given first, if it is."""
Draw = tuple[Place, Shape]
"""Place, and the shape of what it gives."""
_UNSEEN = frozenset[Shape]([()])  # a number, drawn where no trial has drawn, is one for the batch
_BACKWARDS = {func: body_of(func) for func in RUN_CODE}


class SeenDraws(TorchFunctionMode):
    """Counts draws while it is active.

    Attributes:
        counts: draw -> how often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Draw] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in ANSWERS and isinstance(output, Tensor) and not (kwargs or {}).get("generator"):
            self.counts[_place(func, args), tuple(output.shape)] += 1
        return output


class BatchDraws(TorchFunctionMode):
    """Draws what is for the batch from streams that all micro-batches share, while it is active.

    Args:
        device: whose generator is used besides the CPU's.
        seed: of a segment's stream, by segment and call.

    Attributes:
        is_on: whether a trial has seen any draw for a batch.
    """

    def __init__(self, device: torch.device, seed: Callable[[int, int, int], int]) -> None:
        super().__init__()
        self._device, self._seed = device, seed
        self.is_on = False
        self._shapes: dict[Place, set[Shape]] = {}
        self._segment, self._number = (0, 0), 0
        self._entered: set[int] = set()
        self._met: dict[int, int] = {}

    def learn(self, seen: Iterable[Place], of_batch: Iterable[Draw]) -> None:
        """Take note of what trials have seen.

        Args:
            seen: where anything is drawn.
            of_batch: what is for the batch.
        """
        for place in seen:
            self._shapes.setdefault(place, set())
        for place, shape in of_batch:
            self._shapes.setdefault(place, set()).add(shape)
            self.is_on = True

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step."""
        self._entered.clear()
        self._met.clear()
        with self:
            yield

    def enter(self, seed: int, segment: int, call: int) -> None:
        """Say that a segment of a micro-batch draws from a stream of its own from now on.

        Args:
            seed: of that.
            segment: see :meth:`.SegmentStreams.enter`.
            call: likewise.
        """
        self._entered.add(seed)
        self._segment, self._number = (segment, call), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **given)
        if func in _BACKWARDS:
            with self:
                return _BACKWARDS[func](*args, **given)
        if func not in ANSWERS or torch.default_generator.initial_seed() not in self._entered:
            return func(*args, **given)  # which draws nothing, or from a stream of its user's or of a tensor rank
        place = _place(func, args)
        shapes = self._shapes.get(place, _UNSEEN)
        if not shapes or given.get("generator") is not None:
            return func(*args, **given)
        before = self._states()
        key = int(torch.empty((), dtype=torch.int64).random_())
        if key not in self._met:
            self._met[key] = self._seed(*self._segment, self._number)
            self._number += 1
        state = self._states()
        for generator in self._generators:
            generator.manual_seed(self._met[key])
        output = func(*args, **given)
        if isinstance(output, Tensor) and tuple(output.shape) in shapes:
            self._go_to(state)
            return output
        self._go_to(before)
        return func(*args, **given)

    @property
    def _generators(self) -> list[torch.Generator]:
        cuda = self._device.type == "cuda"
        return [torch.default_generator, *([torch.cuda.default_generators[self._device.index or 0]] if cuda else [])]

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _go_to(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def _place(func: Any, args: Any) -> Place:
    given = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else None
    return line_that_draws(), str(getattr(func, "__name__", func)), given
