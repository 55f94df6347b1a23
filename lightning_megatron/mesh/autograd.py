"""Tells whether autograd runs a backward, inside of which layers and random streams behave differently, and whether
layers are to be differentiated twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread, so that a module called now is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


_depth = 0


class differentiating_twice:
    """Inside, split layers and losses compute by functions whose gradients have gradients, which take more memory."""

    def __enter__(self) -> None:
        global _depth
        _depth += 1

    def __exit__(self, *_: object) -> None:
        global _depth
        _depth -= 1


def is_differentiated_twice() -> bool:
    """Whether code runs inside :class:`differentiating_twice`."""
    return _depth > 0


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward of a custom function of which there is no backward.

    torch's ``once_differentiable`` takes what such a backward gives for a constant where the gradient that comes in
    does not depend on anything, as that of a loss. A penalty on gradients would silently be another one.

    Raises:
        RuntimeError: in a backward with ``create_graph=True``.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a gradient of a gradient (`create_graph=True`) goes through a layer or loss that is spread over ranks "
                "or multiplied in 8 bits. It computes first gradients only, as no code of the module was found to ask "
                "for more: write `create_graph=True` in a method of the module or of what it holds, or use "
                "`tensor_parallel_size=1` and no synchronised batch norm."
            )
        return backward(ctx, *gradients)

    return checked
