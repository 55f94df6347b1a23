"""Tensors that are no parameters, such as an optimizer's moments, seen whole by hooks and held in parts by steps."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_megatron.layers.whole.between_steps import NotAlike, SeenBetween, WholeView, alive
from lightning_megatron.layers.whole.parameter_parts import ParameterParts
from lightning_megatron.layers.whole.seen_kinds import seen_among


class StatesView(WholeView):
    """Shows them, as :class:`WholeView` shows parameters.

    Args:
        group: the ranks that meet where one is gathered.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._others: dict[int, SeenBetween] = {}
        self._kind: type = self._kinds.tensor

    def show_others(self, others: Iterable[tuple[ParameterParts, Tensor]], *, held: bool = False) -> None:
        """Show tensors, in the place of those before: of the same parts in the same order on all ranks. Who asks for
        it keeps them.

        Args:
            others: each with how it is split.
            held: whether a step runs, which may compute with them element by element.
        """
        self._others, self._numbered = {}, []
        self._kind = self._kinds.held if held else self._kinds.tensor
        for parts, tensor in others:
            entry = SeenBetween(parts, 2 * len(self._numbered), tensor)
            self._numbered.append(entry)
            self._others[id(tensor)] = entry

    @contextmanager
    def held(self) -> Iterator[None]:
        """Show them in a step, where ranks do not meet."""
        self._thread = threading.get_ident()
        with self._phase(whole=True):
            yield

    def knows(self, tensor: Tensor) -> bool:
        """Whether this view shows a tensor; another one may be open at the same time."""
        return id(tensor) in self._others

    def on_parts(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """The result of a function of each element by itself, held as its operands are; ``None`` if it cannot be."""
        entry = self._entry(seen_among((*args, *kwargs.values()))[0])
        try:
            given, options = tree_map(lambda value: self._operand(entry, value), (args, kwargs))
        except (NotAlike, KeyError, RuntimeError):  # of another shape
            return None
        with torch._C.DisableTorchFunctionSubclass():
            made: Tensor = func(*given, **options)
        self._others[id(made)] = SeenBetween(entry.parts, entry.number, made)
        weakref.finalize(made, self._others.pop, id(made), None)
        made.__class__ = self._kind
        return made

    def _switch(self, whole: bool, *, forgiving: bool = False) -> None:
        if whole == self._whole:
            return
        if not whole:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                kept = [entry.parts.name for entry, tensor in alive(self._others) if self._cut(entry, tensor)]
            super()._switch(whole, forgiving=forgiving)
            if not forgiving:
                self._refuse_kept(kept)
            return
        super()._switch(whole, forgiving=forgiving)
        for _, tensor in alive(self._others):
            tensor.__class__ = self._kind

    def _entry(self, tensor: Tensor) -> SeenBetween:
        return self._others[id(tensor)]

    def _seen_now(self) -> list[tuple[SeenBetween, Tensor]]:
        return list(alive(self._others))
