"""Draws of a step whose numbers are those of one process in any layout: each is answered from counters.

What is drawn comes from a key and the number of the element in the tensor that one process would draw. The key is one
number of torch's generator for the CPU, whatever is drawn, so that it moves on alike where tensors are parts; and what
keeps and restores the state of that generator (recomputation, above all) repeats the draws as ever::

    segment's stream     key 0 ────── key 1 ────── key 2        seeded by seed, step, layer and call
                           │            │            │
    one process        [8, 3, 4]       [4]       [8, 16, 16]    hash of key and number of the element
    micro-batch 1      rows 2, 3       [4]       rows 2, 3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from lightning_megatron.mesh.draws.global_rows import Batched, Rows, Slice, global_indices
from lightning_megatron.mesh.draws.places import Known, Lesson, Place
from lightning_megatron.mesh.torch_functions import line_of_user

Answer = Callable[["LayoutDraws", Any, tuple[Any, ...], dict[str, Any]], Any]

Cutter = Callable[[str, Sequence[int]], Slice | str]

OPTION = "`random_streams='layout'`"
_WHOLE = Rows(0, 1, 1)


class LayoutDraws(TorchFunctionMode):
    """Answers torch's functions that draw, while it is active.

    Args:
        answers: by function.

    Attributes:
        rows: the samples of the running micro-batch among those of the global batch.
        lesson: what is being learned about draws; ``None`` in steps that count.
        splits: whether ranks or micro-batches share the work, so that a draw of torch's own would not be everybody's.
        next_refused: why nothing may be drawn in the step that begins next; or "".
        is_of_samples: whether the latest draw had entries of samples.
        cut: the part that this tensor rank has of a drawn tensor, by function and shape; or why it is not known.
    """

    def __init__(self, answers: dict[Any, Answer], *, splits: bool) -> None:
        super().__init__()
        self.splits, self.is_of_samples = splits, False
        self._answers = answers
        self._learned: dict[str, dict[Place, list[Known]]] = {}
        self._known: dict[Place, list[Known]] | None = None
        self._met: dict[int, tuple[Known, tuple[int, ...]]] = {}
        self._cuts: dict[int, Slice] = {}
        self._segment, self._number = (0, 0), 0
        self.rows = _WHOLE
        self.lesson: Lesson | None = None
        self.next_refused = self._refused = ""
        self.cut: Cutter | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = self._answers.get(func)
        if answer is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return answer(self, func, args, kwargs or {})

    def begin(self, name: str) -> None:
        """Be ready for a step.

        Args:
            name: of the user's step.
        """
        self._known = self._learned.get(name)
        self._refused, self.next_refused = self.next_refused, ""
        self._met.clear()
        self._cuts.clear()

    def knows(self, name: str) -> bool:
        """Whether the draws of a step have been learned."""
        return name in self._learned

    def learn(self, name: str, lesson: Lesson) -> None:
        """Keep what a trial has learned about the draws of a step."""
        self._learned[name] = lesson.known

    def enter(self, segment: int, call: int) -> None:
        """Count draws from 0 again."""
        self._segment, self._number = (segment, call), 0

    @property
    def position(self) -> tuple[tuple[int, int], int]:
        """Segment of the next draw, and its index there."""
        return self._segment, self._number

    @position.setter
    def position(self, position: tuple[tuple[int, int], int]) -> None:
        self._segment, self._number = position

    def take(
        self, function: str, shape: Sequence[int], device: torch.device, values: Tensor | None = None
    ) -> tuple[Tensor, int]:
        """Make a draw.

        Args:
            function: what draws.
            shape: of what it draws.
            device: where.
            values: what it draws for, of that shape.

        Returns:
            Numbers of the elements in one process, int64 and contiguous, and the key.
        """
        if self._refused:
            self.refuse(function, self._refused)
        key = int(torch.empty((), dtype=torch.int64).random_())
        place = (*self._segment, self._number)
        self._number += 1
        if self.lesson is not None:
            if why := self.lesson.note(key, place, function, shape, values):
                self.refuse(function, why)
            return self.lesson.indices(key, shape, device), key
        batched = None if self.rows.are_all else self._batched(key, place, function, shape)
        self.is_of_samples = batched is not None
        cut = self._cut_of(key, function, shape)
        return global_indices(shape, device, self.rows, batched, cut), key

    def _cut_of(self, key: int, function: str, shape: Sequence[int]) -> Slice | None:
        """The part that this tensor rank has; a recomputation, which may run outside the region, has the first's."""
        if self.cut is None or key in self._cuts:
            return self._cuts.get(key)
        found = self.cut(function, shape)
        if isinstance(found, str):
            self.refuse(function, found)
        self._cuts[key] = found
        return found

    def _batched(self, key: int, place: Place, function: str, shape: Sequence[int]) -> Batched | None:
        met = self._met.get(key)
        candidates = (self._known or {}).get(place, []) if met is None else [met[0]]
        known = next((one for one in candidates if one[:2] == (function, len(shape))), None)
        if known is None:
            untried = "ranks or micro-batches share its samples, and only steps of training are tried"
            self.refuse(function, untried if self._known is None else "the first step drew no such thing here")
        found = known.seen(shape, self.rows.size)
        if isinstance(found, str):
            self.refuse(function, found)
        of_one = tuple(size for dim, size in enumerate(shape) if found is None or dim != found.dim)
        of_one += () if found is None else (found.each,)
        if self._met.setdefault(key, (known, of_one))[1] != of_one:
            self.refuse(function, "micro-batches of one batch draw unlike shapes for a sample")
        return found

    def refuse(self, function: str, why: str, where: str = "") -> NoReturn:
        """Refuse a draw that layouts would make unlike.

        Args:
            function: what draws.
            why: it cannot be the same in any layout.
            where: it draws, if not on the line that runs.

        Raises:
            RuntimeError: with the line of the user's code.
        """
        raise RuntimeError(
            f"`{function}` ({where or line_of_user()}) draws numbers that {OPTION} cannot make those of one "
            f"process: {why}. Draw them in the data loader, draw by sample in dim 0, or leave `random_streams` out."
        )


def active_draws() -> LayoutDraws | None:
    """The mode that answers draws now; ``None`` where torch's generators do."""
    return next((mode for mode in _get_current_function_mode_stack() if isinstance(mode, LayoutDraws)), None)
