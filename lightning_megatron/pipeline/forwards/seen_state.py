"""State that the forward of a recomputed module has read and written besides its arguments and its output.

A layer may count its calls, or follow its batches in buffers (batch norm, spectral norm). Running its forward again for
the backward must neither count twice nor see the count of later micro-batches, and what it drew from Python's or
NumPy's generator it draws again (torch's generators are put back by its checkpoint)::

    forward     calls 3 ──▶ 4      noted: calls was 3
    ...         calls 4 ──▶ 6      by other micro-batches
    backward    calls 3 ──▶ 4      the forward again, as it was; then 6 again
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_megatron.mesh.autograd import in_backward
from lightning_megatron.mesh.other_generators import all_of_others, set_others, states_of_others
from lightning_megatron.pipeline.elsewhere.reachable import Reach
from lightning_megatron.pipeline.elsewhere.undo import Change, Contents, Snapshot

Place = tuple[nn.Module, str]


@dataclass
class SeenState:
    """The state that one forward has found.

    Attributes:
        changes: numbers and tensors without a gradient that it assigned anew.
        buffers: those that forwards write into, with copies of their values before it; ``None`` where it was the first
            that did.
        generators: states of Python's and NumPy's, if it drew from them.
        dtype: of numbers that it makes without saying of which: the precision sets it around a step, not a backward.
    """

    dtype: torch.dtype | None = None
    changes: list[Change] = field(default_factory=list)
    buffers: list[tuple[Place, Tensor | None]] = field(default_factory=list)
    generators: Mapping[str, Any] | None = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around a recomputation: everything is as it was then, and afterwards as it is now.

        Buffers are exchanged for copies rather than written to, because graphs may hold them.
        """
        now = [(change.container, change.key, change.container.read(change.key)) for change in self.changes]
        tensors = [(owner, name, owner._buffers.get(name)) for (owner, name), _ in self.buffers]
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype or default)
        drawn = None if self.generators is None else all_of_others()
        if self.generators is not None:
            set_others(self.generators)
        for change in self.changes:
            change.container.put(change.key, change.old)
        for (owner, name), before in self.buffers:
            tensor = owner._buffers[name] if before is None else before
            owner._buffers[name] = None if tensor is None else tensor.clone()
        try:
            yield
        finally:
            torch.set_default_dtype(default)
            if drawn is not None:
                set_others(drawn)
            for owner, name, tensor in tensors:
                owner._buffers[name] = tensor
            for container, key, value in now:
                container.put(key, value)


class StatefulForward:
    """Runs the forward of one module, and again as it ran, for its backward.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._leaves: bool | None = None  # whether it changes anything but buffers in place; unknown before a call
        self._written: set[tuple[int, str]] | None = None  # buffers that it writes into; likewise

    def run(self, seen: SeenState, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward.

        Args:
            seen: of this call; filled by its first run, read by the others.
            forward: of the module.
            args: for it.
            kwargs: for it.
        """
        if in_backward():
            return self.again(seen, forward, *args, **kwargs)
        before = self._snapshot() if self._leaves is not False else None
        seen.dtype = torch.get_default_dtype()
        place, generators = states_of_others(), all_of_others()
        kept = [(at, Contents.of_tensor(buffer, copies=self._may_write(at))) for at, buffer in self._buffers()]
        try:
            return forward(*args, **kwargs)
        finally:
            seen.generators = generators if states_of_others() != place else None
            self._written = {_key(place) for place, buffer in kept if self._wrote(place, buffer)}
            seen.buffers = [(place, buffer.copy) for place, buffer in kept if _key(place) in self._written]
            if before is not None:
                changes = before.compare()
                seen.changes = [change for change in changes if not change.is_of_micro_batch]
                if self._leaves is None:
                    self._leaves = bool(changes)

    def again(self, seen: SeenState, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward as it ran when ``seen`` was filled, and leave what it writes as it is now."""
        with seen.again():
            return self._run_and_take_back(forward, *args, **kwargs)

    def _run_and_take_back(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run once more; what it appends to lists, or keeps with a gradient, the step has read already."""
        if self._leaves is False:
            return forward(*args, **kwargs)
        before = self._snapshot()
        try:
            return forward(*args, **kwargs)
        finally:
            before.compare()
            before.take_back()

    def _snapshot(self) -> Snapshot:
        return Snapshot(Reach(self._module, self._module, frozenset()).containers())

    def _buffers(self) -> Iterator[tuple[Place, Tensor]]:
        for owner in self._module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and not buffer.is_inference():
                    yield (owner, name), buffer

    def _may_write(self, place: Place) -> bool:
        return self._written is None or _key(place) in self._written or isinstance(place[0], _NormBase)

    def _wrote(self, place: Place, buffer: Contents) -> bool:
        """Whether forwards write into a buffer. Norms do so behind autograd's back, which counts no version."""
        if buffer.is_touched(buffer.value) or isinstance(place[0], _NormBase):
            return True
        if self._written is not None:
            return _key(place) in self._written
        return buffer.is_changed(buffer.value, uncounted=True)


def _key(place: Place) -> tuple[int, str]:
    return id(place[0]), place[1]
