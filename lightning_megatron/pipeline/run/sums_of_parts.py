"""Sums over parameters of several parts, between two backwards of a step: each stage would have another one.

After a ``self.manual_backward`` a step may go over ``self.parameters()`` or over an optimizer's groups, which hold
this stage's. What it does to each by itself is what one process does. A norm over all of them is not: each stage gets
that of its own, and would scale by it::

    stage 0   layers 0 1   sqrt(|g0|² + |g1|²)  ┐  one process: sqrt(|g0|² + |g1|² + |g2|² + |g3|²)
    stage 1   layers 2 3   sqrt(|g2|² + |g3|²)  ┘

So scalars that were made of a parameter or of its gradient are followed, and refused where those of two parts meet, or
where Python reads one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.mesh.parts.packages import PACKAGE, comes_from, module_of
from lightning_megatron.pipeline.elsewhere.away import tensors_in

_JOINS = ("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack")
_READS = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__")


@dataclass(frozen=True)
class _Note:
    """Of a tensor: names of the parts that it was made of, and whether it is a scalar made of more."""

    tensor: Tensor
    parts: frozenset[str]
    is_sum: bool


class SumsOfParts(TorchFunctionMode):
    """Around the code of a step between two of its backwards.

    Args:
        parts: by id of a parameter of this stage, the name of the part or layer that it belongs to.
        calls_step: whether a frame of this package is the one that calls the step.
    """

    def __init__(self, parts: Mapping[int, str], calls_step: Callable[[FrameType], bool]) -> None:
        super().__init__()
        self._parts, self._calls_step = parts, calls_step
        self._notes: dict[int, _Note] = {}
        self.active = False

    def switch(self, active: bool) -> None:
        """Follow from here on, or forget."""
        self.active = active
        self._notes.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.active:
            return func(*args, **kwargs)
        found = [note for tensor in tensors_in((args, kwargs)) if (note := self._note_of(tensor)) is not None]
        if found:
            self._check(func, found)
        output = func(*args, **kwargs)
        if found:
            self._follow(func, found, output, args)
        return output

    def _note_of(self, tensor: Tensor) -> _Note | None:
        note = self._notes.get(id(tensor))
        if note is None and isinstance(tensor, nn.Parameter) and id(tensor) in self._parts:
            return _Note(tensor, frozenset({self._parts[id(tensor)]}), False)
        return note

    def _check(self, func: Any, found: list[_Note]) -> None:
        name = getattr(func, "__name__", "")
        sums = [note.parts for note in found if note.is_sum]
        met = frozenset[str]().union(*(note.parts for note in found)) if name in _JOINS else frozenset().union(*sums)
        reads = name in _READS and bool(sums)
        if reads or (len(met) > 1 and (name in _JOINS or len(set(sums)) > 1)):
            frame = self._line_of_user()
            if frame is not None:
                self._refuse(sorted(met), frame, reads=reads)

    def _follow(self, func: Any, found: list[_Note], output: Any, args: Any) -> None:
        parts = frozenset[str]().union(*(note.parts for note in found))
        outputs = list(tensors_in(output))
        name = getattr(func, "__name__", "")
        if name.startswith("_foreach") and len(outputs) == len(args[0]):
            for tensor, source in zip(outputs, args[0], strict=True):
                note = self._note_of(source)
                if note is not None:
                    self._put(tensor, note.parts, [note])
            return
        if not outputs and name == "__setitem__":
            self._notes[id(args[0])] = _Note(args[0], parts, any(note.is_sum for note in found))
        for tensor in outputs:
            self._put(tensor, parts, found)

    def _put(self, tensor: Tensor, parts: frozenset[str], found: list[_Note]) -> None:
        is_sum = tensor.numel() == 1 and any(note.is_sum or note.tensor.numel() > 1 for note in found)
        if id(tensor) not in self._parts:
            self._notes[id(tensor)] = _Note(tensor, parts, is_sum)

    def _line_of_user(self) -> FrameType | None:
        """Line of the user's step; ``None`` in code of this package, and in an optimizer of torch."""
        frame: FrameType | None = sys._getframe(2)
        line: FrameType | None = None
        while frame is not None:
            if module_of(frame) != __name__:
                if comes_from(frame, "torch.optim", PACKAGE):
                    return line if self._calls_step(frame) else None
                if line is None and not comes_from(frame, "torch"):
                    line = frame
            frame = frame.f_back
        return line

    def _refuse(self, parts: list[str], frame: FrameType, *, reads: bool) -> None:
        what = "reads, in Python, a number made of" if reads else "puts together"
        names = ", ".join(f"`{part}`" for part in parts[:3])
        raise RuntimeError(
            f"the step {what} parameters or gradients of {names} between two of its backwards "
            f"({frame.f_code.co_filename}:{frame.f_lineno}). Under a pipeline each stage has only its own, so the "
            "result would be another one on every stage. Clip by `self.clip_gradients`, take the norm over all stages "
            "from `self.trainer.strategy.gradient_norm()`, or use `pipeline_parallel_size=1`."
        )


def parts_of(module: nn.Module, layers: tuple[str, ...], part_of: Callable[[str], str | None]) -> dict[int, str]:
    """By id of each parameter that only this stage has, its layer or part.

    Args:
        module: the user's, cut.
        layers: names of the trunk's layers.
        part_of: name of the part that a parameter belongs to; ``None`` if every stage computes with it.
    """
    found: dict[int, str] = {}
    inside = Parts(layers)
    for name, parameter in type(module).named_parameters(module):
        part = inside.of(name) or part_of(name)
        if part is not None and not parameter.is_meta and type(parameter) is not torch.Tensor:
            found[id(parameter)] = part
    return found
