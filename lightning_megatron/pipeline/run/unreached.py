"""Gradients that nothing gives, across a boundary.

In one process a weight on which the loss does not depend has no gradient, and an optimizer leaves it alone. With zeros
AdamW decays it, and goes on with its momentum. So a stage that waits for the gradient of what it has sent is told if
there is none: it gets bits that no computation gives::

    stage 0   h ──────▶ h   stage 1   loss = head(h.detach())
           None ◀────── NaN with bits of ours

To look at a number, the host of an accelerator waits for the device. So it looks only until a step has given the
gradient. From then on zeros stand for it in micro-batches that do not give it, which changes nothing where others of
the step do; a step in which none does is refused. A new epoch begins anew, as does what is frozen or thawed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

_BITS = {2: (torch.int16, 0x7FE5), 4: (torch.int32, 0x7FE5A5A5), 8: (torch.int64, 0x7FFE5A5A5A5A5A5A)}
_Gradient = tuple[Hashable, int]


class Unreached:
    """Tells the stage before, and hears from the one behind, which gradients of boundaries there are.

    Invariants: both sides of a boundary know the same of it. What a step has shown counts from the next one on, so the
    order of micro-batches does not matter.

    Args:
        looks_always: whether to look each time, as costs nothing on a CPU.
    """

    def __init__(self, looks_always: bool) -> None:
        self._looks_always = looks_always
        self._given: dict[bool, set[_Gradient]] = {True: set(), False: set()}  # by whether this rank is told
        self._seen: dict[bool, set[_Gradient]] = {True: set(), False: set()}
        self._lacking: set[_Gradient] = set()

    def forget(self, *, heard: bool) -> None:
        """Begin anew with the boundaries behind which others tell, or with those where this rank does."""
        self._given[heard].clear()

    def to_send(
        self, key_of: Callable[[], Hashable], gradients: Sequence[tuple[Tensor, Tensor | None]]
    ) -> list[Tensor]:
        """Tensors to send for some gradients.

        Args:
            key_of: makes the key of the boundary, where one is needed.
            gradients: what has come through it, with its gradients; ``None`` where nothing depended on it.
        """
        if self._looks_always:
            return [no_gradient(tensor) if gradient is None else gradient for tensor, gradient in gradients]
        key, found = key_of(), []
        for place, (tensor, gradient) in enumerate(gradients):
            if gradient is not None:
                self._seen[False].add((key, place))
            elif (key, place) in self._given[False]:
                self._lacking.add((key, place))
            filled = torch.zeros_like if (key, place) in self._given[False] else no_gradient
            found.append(filled(tensor) if gradient is None else gradient)
        return found

    def received(self, key_of: Callable[[], Hashable], tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients in what has arrived.

        Args:
            key_of: makes the key of the boundary, where one is needed.
            tensors: what has arrived.
        """
        if self._looks_always:
            return [None if is_no_gradient(tensor) else tensor for tensor in tensors]
        key, found = key_of(), list[Tensor | None]()
        for place, tensor in enumerate(tensors):
            none = (key, place) not in self._given[True] and is_no_gradient(tensor)
            if not none:
                self._seen[True].add((key, place))
            found.append(None if none else tensor)
        return found

    def settle(self) -> None:
        """End a step.

        Raises:
            RuntimeError: the loss did not depend on what has come through a boundary, as it did before.
        """
        if self._looks_always:
            return
        lacking = self._lacking - self._seen[False]
        for heard, seen in self._seen.items():
            self._given[heard] |= seen
        if lacking:
            raise RuntimeError(
                "the loss does not depend on what the layers before give, as it did in an earlier step, so that "
                "their weights have no gradients in this one, which their pipeline stages cannot know. Change what "
                "the loss depends on between epochs only, or let stages ask each time: "
                "`MegatronStrategy(variable_shapes=True)`."
            )

    def drop(self) -> None:
        """Forget what a step has shown: it has been settled, or has not come to its end."""
        self._lacking.clear()
        for seen in self._seen.values():
            seen.clear()


def no_gradient(like: Tensor) -> Tensor:
    """Bits to send in place of a gradient of the shape of ``like`` that nothing has given."""
    if like.is_complex():
        return torch.view_as_complex(no_gradient(torch.view_as_real(like)))
    dtype, bits = _BITS[like.itemsize]
    return torch.full(like.shape, bits, dtype=dtype, device=like.device).view(like.dtype)


def is_no_gradient(tensor: Tensor) -> bool:
    """Whether a tensor that has arrived is :func:`no_gradient`."""
    if not tensor.numel() or tensor.is_meta:
        return False
    first = tensor.view(-1)[:1]
    value = first.item()
    if value == value:
        return False
    dtype, bits = _BITS[(first := torch.view_as_real(first) if first.is_complex() else first).itemsize]
    return bool(first.view(dtype).flatten()[0] == bits)
