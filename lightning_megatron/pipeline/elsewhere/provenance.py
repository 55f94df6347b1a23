"""What does the next stage lack? Follows values through the first run of each kind of step.

Between the parts of a module the user's code computes what it likes: a mask from the embedding's output, a teacher's
logits, a conditioning vector. Where it is passed to a layer of the next stage, and that stage lacks the part it comes
from, it must travel with the hidden state. Gradients show some of these values; a mask, a detached value or anything in
evaluation has no gradient. So the first run of every kind of step is traced, call by call of torch's functions, for
what is *made* of parameters or layers that not every stage has. What the other stages have in its place they know by
themselves (:mod:`.away`), and in every step: a value that is first passed on later than that is refused there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megatron.mesh.torch_functions import line_of_user
from lightning_megatron.pipeline.elsewhere.away import (
    BLIND,
    FIRST_ONLY,
    TAKES_NUMBERS,
    Away,
    mark,
    source_of,
    tensors_in,
    writes_in_place,
)
from lightning_megatron.pipeline.elsewhere.inner_gradients import SWITCHES, begun_by, check_inner_gradient
from lightning_megatron.pipeline.elsewhere.presence import Presence


class TracePlan:
    """Chooses the runs of steps that are traced: the first of each kind."""

    def __init__(self) -> None:
        self._done: set[tuple[tuple[int, int], str]] = set()

    def is_done(self, bounds: tuple[int, int], where: str) -> bool:
        """Whether the next run of the layers ``bounds`` in the step ``where`` need not be traced."""
        return (bounds, where) in self._done

    def note_run(self, bounds: tuple[int, int], where: str) -> None:
        """Say that such a run was traced."""
        self._done.add((bounds, where))

    def renew(self) -> None:
        """Trace the next run of each kind again."""
        self._done.clear()


class Provenance(TorchFunctionMode):
    """Traces one run of a step on one virtual stage.

    Args:
        module: the user's module, cut.
        presence: what of it is here.
        received: what the stage before sent.
        ends: tells whether the run is after the last layer.
    """

    def __init__(self, module: nn.Module, presence: Presence, received: list[Tensor], ends: Callable[[], bool]) -> None:
        super().__init__()
        self._received, self._ends = received, ends
        self._begun: dict[int, Tensor] = {}
        named = module.named_parameters(remove_duplicate=False)
        self._own = frozenset(id(parameter) for name, parameter in named if not presence.is_everywhere(name))
        self._made: dict[int, Tensor] = {}
        self._paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        check_inner_gradient(func, args, kwargs, self._received, self._begins_here, source_of)
        required = func in SWITCHES and args[0].requires_grad
        output = func(*args, **kwargs)
        begun = None if required else begun_by(func, args, kwargs, output)
        if begun is not None and self._ends():
            self._begun[id(begun)] = begun
        if func in TAKES_NUMBERS and (source := source_of((args[1:] if func is torch.full_like else args, kwargs))):
            return mark(output, source)
        if self._paused or func in BLIND:
            return output
        if type(output) is Away and not output.source.line:  # what is made of it has the source, and so the line
            output.source = replace(output.source, line=line_of_user())
        if self._any_made(args[:1] if func in FIRST_ONLY else (args, kwargs)):
            self.note_made(output)
            if writes_in_place(getattr(func, "__name__", "")) and args:
                self.note_made(args[0])
            if "out" in kwargs:
                self.note_made(kwargs["out"])
        return output

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Look away: inside a layer, and while stand-ins are made."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def note_made(self, value: Any) -> None:
        """Say that the tensors in ``value`` were computed here."""
        for tensor in tensors_in(value):
            if type(tensor) is not Away:
                self._made[id(tensor)] = tensor

    def travels(self, tensor: Tensor) -> bool:
        """Whether the next stage cannot compute ``tensor`` for itself."""
        return id(tensor) in self._made or id(tensor) in self._own

    def _begins_here(self, identity: int) -> bool:
        """Whether no other stage computes with a tensor, by its id."""
        return identity in self._own or identity in self._begun

    def _any_made(self, value: Any) -> bool:
        return any(self.travels(tensor) for tensor in tensors_in(value))
