"""Random numbers that a step draws once per batch, not per sample: drawn once for all micro-batches.

A coin (``if torch.rand(()) < 0.5``), a time for all samples or the mask of a position table is one for the batch in one
process. Micro-batches draw from streams of their own, where each would toss its own. A trial shows which draws have the
same shape in a part of a batch and in the whole (:mod:`~lightning_megatron.mesh.draws.same_draws`); these are taken
from streams that all micro-batches share::

    stream of micro-batch 0     key a ── mask ──              key a, key b: name the draw, so that what restores the
    stream of micro-batch 1     key b ── mask ──              stream, as recomputation does, repeats it
    stream of the batch         coin ─────────────            of segment and number of the draw in it

Python's and NumPy's generators begin alike in all micro-batches, so that what they draw for the batch falls alike.
Which of their draws trials have met is known in the same way (:mod:`~lightning_megatron.mesh.other_generators`).

A draw is known again by the line of the user's code, the function, and the shape. Backwards are taken over to run under
the mode as well, as code in them is computed again.
"""

from __future__ import annotations

import contextlib
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_megatron.mesh.draws.answers import RUN_CODE, body_of
from lightning_megatron.mesh.draws.functions import ANSWERS, draws_nothing
from lightning_megatron.mesh.other_generators import ORDERS, OtherDraws
from lightning_megatron.mesh.parts.bytecode import instructions_of
from lightning_megatron.mesh.torch_functions import line_of_user

Shape = tuple[int, ...]
Place = tuple[str, str, Shape | None]
"""Line of the user's code, name of the function, and shape of the tensor that it is given first, if it is."""
Draw = tuple[Place, Shape]
"""Place, and the shape of what it gives."""
_UNSEEN = frozenset[Shape]([()])  # a number, drawn where no trial has drawn, is one for the batch
_BACKWARDS = {func: body_of(func) for func in RUN_CODE}
_NAMES = {name for func in ANSWERS if (name := getattr(func, "__name__", ""))} | {"sample", "rsample"}
_ORDERS = ORDERS | {"randperm"}
_ASKS = 16  # trials for the sake of draws that steps before have met


def lines_that_draw(codes: Iterable[types.CodeType]) -> set[tuple[str, str]]:
    """Lines of the user's code that mention functions which draw, whether they run or not; and their names."""
    found, waiting = set[tuple[str, str]](), list(codes)
    while waiting:
        code = waiting.pop()
        waiting += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for step in instructions_of(code):
            at = None if step.positions is None else step.positions.lineno
            if step.opname.startswith("LOAD_") and step.argval in _NAMES and at is not None:
                found.add((f"{code.co_filename}:{at}", step.argval))
    return found


class SeenDraws(TorchFunctionMode):
    """Counts draws while it is active.

    Attributes:
        counts: draw -> how often; 0 for a dropout that is off.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Draw] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in ANSWERS and isinstance(output, Tensor) and not (kwargs or {}).get("generator"):
            self.counts[_place(func, args), tuple(output.shape)] += not draws_nothing(func, args, kwargs or {})
        return output

    def note(self, name: str, shape: Shape) -> None:
        """Count a draw from Python's or NumPy's generator."""
        self.counts[(line_of_user(), name, None), shape] += 1


class BatchDraws(TorchFunctionMode):
    """Draws what is for the batch from streams that all micro-batches share, while it is active.

    Args:
        device: whose generator is used besides the CPU's.
        seed: of a segment's stream, by segment and call.

    Attributes:
        is_on: whether a trial has seen any draw for a batch from torch's generators.
        others: lines that may draw from Python's and NumPy's generators.
        mentioned: lines of the step that mention functions which draw, and their names.
    """

    def __init__(self, device: torch.device, seed: Callable[[int, int, int], int]) -> None:
        super().__init__()
        self._device, self._seed = device, seed
        self.is_on = False
        self.mentioned: set[tuple[str, str]] = set()
        self.others, self._compiled = OtherDraws(), False
        self._met_late, self._guessed = set[Place](), set[Place]()
        self._asked, self._notes = 0, False
        self._shapes: dict[Place, set[Shape]] = {}
        self._segment, self._number = (0, 0), 0
        self._entered: set[int] = set()
        self._met: dict[int, tuple[int, int]] = {}  # key -> seed, and number in its segment

    def expect(self, functions: Collection[types.FunctionType], *, compiled: bool) -> None:
        """Say what a training step may run.

        Args:
            functions: the user's that it may call; see :func:`lines_that_draw`.
            compiled: whether any code is compiled, of which it cannot be said what it draws.
        """
        others = OtherDraws(functions)
        self._compiled = compiled and bool(others.lines)
        if not compiled:
            self.others = others
            self.mentioned = lines_that_draw(function.__code__ for function in functions) | others.lines

    @property
    def others_may_come(self) -> bool:
        """Whether a step may draw from Python's or NumPy's generator where no trial has."""
        return self._compiled or any(map(_is_of_others, self.mentioned))

    def orders(self, met: Iterable[Place]) -> str:
        """A function that may put the samples of a batch in an order and that no trial has met, and its line; or "".

        Args:
            met: by the latest trial.
        """
        left = self.mentioned - {(line, name) for line, name, _ in met}
        orders = [(line, name) for line, name in left if name in _ORDERS]
        return min((f"`{name if '.' in name else 'torch.' + name}` in {line}" for line, name in orders), default="")

    def may_draw(self, *, training: bool = True) -> bool:
        """Whether any draw of a step may be for the batch."""
        return self.is_on or (training and bool(self.mentioned))

    def asks(self) -> bool:
        """Whether a trial may show what a draw is for that a step has met, and no trial."""
        asks = bool(self._met_late) and self._asked < _ASKS
        self._asked += asks
        return asks

    def learn(self, seen: Iterable[Place], of_batch: Collection[Draw]) -> list[Place]:
        """Take note of what trials have seen; gives what was taken for the batch's in steps before, and is not.

        Args:
            seen: where anything is drawn.
            of_batch: what is for the batch.

        Raises:
            RuntimeError: in a step before, micro-batches have each drawn for themselves what is for the batch.
        """
        late, drawn, shared = set(self._met_late), {place for place, _ in of_batch}, list[Place]()
        for place in seen:
            if place in self._guessed - drawn:
                shared.append(place)
            self._guessed.discard(place)
            self._shapes.setdefault(place, set())
            self._met_late.discard(place)
            self.mentioned = {one for one in self.mentioned if not _is_met(one, place)}
        for place, shape in of_batch:
            self._shapes.setdefault(place, set()).add(shape)
            if _is_of_others(place):
                continue  # which all micro-batches have drawn alike
            self.is_on = True
            if place in late and shape not in _UNSEEN:
                raise RuntimeError(
                    f"`{place[1]}` in {place[0]} draws {list(shape)} for a batch, which each micro-batch has drawn for "
                    "itself in a step before: a condition kept it out of the steps that were tried. Draw it in every "
                    "step, in front of the condition; or pass `MegatronStrategy(whole_batch_loss=True)`, with which "
                    "batches stay whole, or `whole_batch_loss=False`, if each micro-batch's own is meant."
                )
        return shared

    @contextlib.contextmanager
    def step(self, *, training: bool) -> Iterator[None]:
        """Around a step.

        Args:
            training: whether trials of training steps may meet what it meets.
        """
        self._entered.clear()
        self._met.clear()
        self._notes = training
        unmet = training and any(map(_is_of_others, self.mentioned))
        with self, self.others.noting(self._meet) if unmet else contextlib.nullcontext():
            yield

    def _meet(self, name: str, shape: Shape) -> None:
        """Take a draw from Python's or NumPy's generator that no trial has met for one of the batch."""
        place = (line_of_user(), name, None)
        if place not in self._shapes:
            self._met_late.add(place)
            self._guessed.add(place)

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
        if draws_nothing(func, args, given):
            return func(*args, **given)
        place = _place(func, args)
        if place not in self._shapes and self._notes:
            self._met_late.add(place)
        shapes = self._shapes.get(place, _UNSEEN)
        if not shapes or given.get("generator") is not None:
            return func(*args, **given)
        before = self._states()
        key = int(torch.empty((), dtype=torch.int64).random_())
        seed, number = self._met.get(key) or (self._seed(*self._segment, self._number), self._number)
        state = self._states()
        for generator in self._generators:
            generator.manual_seed(seed)
        output = func(*args, **given)
        if isinstance(output, Tensor) and tuple(output.shape) in shapes:
            self._guessed.update([place] if place in self._met_late else ())
            self._go_to(state)
            self._met[key], self._number = (
                (seed, number),
                number + 1,
            )  # of the next, where a known one is drawn again too
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


def _is_met(mentioned: tuple[str, str], place: Place) -> bool:
    """Whether a draw is one that a line mentions, which may name another function that draws by it."""
    (line, name), (at, drawn, _) = mentioned, place
    return line == at and (name == drawn or _ORDERS.isdisjoint((name, drawn)))


def _is_of_others(place: tuple[Any, ...]) -> bool:
    """Whether a place, or a line, draws from Python's or NumPy's generator."""
    return str(place[1]).startswith(("random.", "numpy."))


def _place(func: Any, args: Any) -> Place:
    given = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else None
    return line_of_user(), str(getattr(func, "__name__", func)), given
