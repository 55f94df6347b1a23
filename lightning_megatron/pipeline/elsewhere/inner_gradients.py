"""Gradients that a step takes itself: right where their whole path lies on the stage that takes them, else refused.

A penalty on ``torch.autograd.grad(output, x)`` needs the path from ``x`` to the output. Under a pipeline the autograd
graph of a stage begins at what the stage before sent, so of an ``x`` from before the layers the path, or most of it, is
elsewhere::

    x ──embed──layers 0-1──▶ │ ──layers 2-3──▶ h ──head──▶ output      grad(output, h): here
    └── elsewhere ──────────┘ └── this stage ──────── w ──┘            grad(output, x): refused

A ``w`` that the step makes after the layers (the scale of invariant risk minimization) is here with its whole path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_megatron.mesh.autograd import graph_behind

SWITCHES = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_BACKWARDS = (torch.autograd.backward, Tensor.backward)


def begun_by(func: Any, args: Any, kwargs: Any, output: Any) -> Tensor | None:
    """The tensor that a call of a torch function has made require gradients, with nothing behind it.

    Args:
        func: what was called.
        args: its positional arguments.
        kwargs: its keyword arguments.
        output: what it gave.
    """
    switched = args[0] if func in SWITCHES else None
    makes = kwargs.get("requires_grad") is True and kwargs.get("out") is None
    tensor = output if makes else switched
    return tensor if isinstance(tensor, Tensor) and tensor.is_leaf and tensor.requires_grad else None


def check_inner_gradient(
    func: Any,
    args: Any,
    kwargs: Any,
    received: Sequence[Tensor],
    own: Callable[[int], bool],
    source_of: Callable[[Any], Any],
) -> None:
    """Refuse a gradient whose path leaves this stage.

    Args:
        func: what the step called.
        args: its positional arguments.
        kwargs: its keyword arguments.
        received: what the stage before sent; empty on the first.
        own: tells, by their ids, tensors whose path is on this stage: parameters that others do not compute with, and
            what the step has made after the layers.
        source_of: tells what on another stage a value depends on; the stage that has the outputs checks the path.

    Raises:
        RuntimeError: with what to change.
    """
    if func in _BACKWARDS:
        raise RuntimeError(
            "the step runs a backward of its own (`.backward()`), but under a pipeline the schedule runs it, over all "
            "stages. Return the loss (with manual optimization, call `self.manual_backward(loss)`), or use "
            "`pipeline_parallel_size=1`."
        )
    if func is not torch.autograd.grad or not received:
        return
    outputs, inputs = _tensors(args, kwargs, 0, "outputs"), _tensors(args, kwargs, 1, "inputs")
    if source_of(outputs) is not None:
        return
    elsewhere = any(_begins_elsewhere(output, received) for output in outputs)
    for tensor in inputs:
        if own(id(tensor)) or _begins_elsewhere(tensor, received):
            continue
        if elsewhere or not _reach(outputs, tensor):  # in evaluation no graph begins at what was received
            _refuse(tensor)


def gradients_away(args: Any, kwargs: Any, source_of: Callable[[Any], Any]) -> tuple[list[Tensor], Any]:
    """Answer ``torch.autograd.grad`` on a stage that lacks the numbers: the stage that has the outputs takes it.

    Args:
        args: its positional arguments, stand-ins among them.
        kwargs: its keyword arguments.
        source_of: tells what on another stage a value depends on.

    Returns:
        Zeros like the inputs, and what the outputs depend on.

    Raises:
        RuntimeError: the outputs are here, so the path from inputs elsewhere leaves this stage.
    """
    outputs, inputs = _tensors(args, kwargs, 0, "outputs"), _tensors(args, kwargs, 1, "inputs")
    source = source_of(outputs)
    if source is None:
        _refuse(next(tensor for tensor in inputs if source_of(tensor) is not None))
    return [torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in inputs], source


def _refuse(tensor: Tensor) -> NoReturn:
    raise RuntimeError(
        "the step takes a gradient (`torch.autograd.grad`) with respect to a tensor of shape "
        f"{tuple(tensor.shape)} from before the layers, but the layers between are on other pipeline stages. "
        "Take gradients only with respect to what the last layers gave, or use `pipeline_parallel_size=1`."
    )


def _tensors(args: Any, kwargs: Any, place: int, name: str) -> list[Tensor]:
    value = args[place] if len(args) > place else kwargs.get(name, ())
    return [value] if isinstance(value, Tensor) else [item for item in value if isinstance(item, Tensor)]


def _reach(outputs: Sequence[Tensor], tensor: Tensor) -> bool:
    """Whether outputs were computed from a tensor, by their graph."""
    if any(output is tensor for output in outputs):
        return True
    nodes = list(graph_behind([output.grad_fn for output in outputs]))
    return any(node is tensor.grad_fn or getattr(node, "variable", None) is tensor for node in nodes)


def _begins_elsewhere(tensor: Tensor, received: Sequence[Tensor]) -> bool:
    """Whether the autograd graph of ``tensor`` reaches back to what the stage before sent."""
    if any(tensor is other for other in received):
        return True
    starts = {id(other.grad_fn) for other in received if other.grad_fn is not None}
    return any(
        id(node) in starts or any(getattr(node, "variable", None) is other for other in received)
        for node in graph_behind([tensor.grad_fn])
    )
