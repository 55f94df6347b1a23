"""State of autograd that layers and random streams depend on: inside a backward, under double differentiation, and the
versions of tensors that graphs hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_megatron.mesh.nested import Nested

graph_task = torch._C._current_graph_task_id
"""Number of the backward that runs on this thread, -1 for none: `in_backward`, where each call of a layer asks."""


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread, so that a module called now is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_graph(tensor: Tensor) -> bool:
    """Whether a tensor was computed with a graph; one that was made and written without one is not to be asked."""
    return torch.is_grad_enabled() and tensor.grad_fn is not None


def graph_behind(nodes: Iterable[Any], stops: Callable[[Any], bool] = lambda _: False) -> Iterator[Any]:
    """The nodes of an autograd graph from which ``nodes`` were computed, each once, with ``nodes`` themselves.

    Args:
        nodes: such as ``grad_fn`` of some tensors; ``None`` for one that has no graph.
        stops: whether what is behind a node is left out.
    """
    waiting, seen = list(nodes), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if not stops(node):
            waiting += [following for following, _ in node.next_functions]


differentiating_twice = Nested()
"""Context in which split layers and losses support ``create_graph=True``, which takes more memory."""


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of a custom autograd function that cannot be differentiated again.

    torch's ``once_differentiable`` is not enough: if the incoming gradient does not require grad, as that of a loss,
    the result counts as a constant, and a penalty on gradients would silently have a wrong gradient.

    Returns:
        A backward that raises ``RuntimeError`` if it runs with ``create_graph=True``.
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


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to in place; 0 of tensors of inference mode, which do not count."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """:func:`version_of` of several."""
    tensors = list(tensors)
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # one is of inference mode
        return list(map(version_of, tensors))


def put_back(tensor: Tensor, numbers: Tensor, version: int) -> None:
    """Write ``numbers`` into ``tensor``, as they were at ``version``.

    Batch norm writes its statistics without counting a version: its backward does not read them. Where no version was
    counted since, none is counted here, lest a graph that holds the tensor refuses its backward.

    Args:
        tensor: a buffer.
        numbers: its values then.
        version: its version then.
    """
    counts = tensor.is_inference() or tensor._version != version
    with torch.no_grad():
        tensor.copy_(numbers)
    if not counts:
        count_back(tensor, version)


def count_back(tensor: Tensor, version: int) -> None:
    """Count no write to ``tensor`` since it was at ``version``: a graph that holds it then may run its backward."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def saved_values(tensor: Tensor) -> Tensor:
    """The values of a tensor that autograd saves, for hooks on saved tensors to keep; writes to it count for them, too.

    The result of an operation that saves it (``exp``, ``rsqrt``, ``softmax``, attention) would hold the graph that
    holds it by way of the hooks. No garbage collector sees that: a graph without a backward, as that of a trial, would
    stay for ever, with all that it has saved.
    """
    return tensor if tensor.grad_fn is None else tensor.detach()


class HandsOn:
    """Hooks on saved tensors that hand all but their own to the hooks around them; their pack is a method.

    Attributes:
        around: those hooks, pack and unpack, or ``None``.
    """

    around: tuple[Callable[..., Any], Callable[..., Any]] | None = None


class Forgetting(HandsOn):
    """Hooks on saved tensors by which a graph keeps none of them, for a forward that no backward follows.

    The graph is there, so code that asks what requires gradients goes the ways it goes in a step; of activations, only
    those are in memory that the forward itself still needs.

    Args:
        tells: what to do about code that reads one, for the error.
    """

    def __init__(self, tells: str) -> None:
        self._tells = tells

    def around_forward(self) -> saved_tensors_hooks:
        """A context; hooks inside of it that hand tensors on hand them to nobody."""
        self.around = saved_hooks(True)
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> None:
        """Keep nothing of it."""

    def _unpack(self, _: None) -> Tensor:
        raise RuntimeError(f"a step differentiates within itself what is run forward only here; {self._tells}.")


saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""The latest hooks on saved tensors, of whatever kind; ``None`` for none."""


def innermost_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The hooks that autograd hands saved tensors to at present, by way of those that hand them on."""
    top: Any = saved_hooks(True)
    while top is not None and isinstance(owner := getattr(top[0], "__self__", None), HandsOn):
        top = owner.around
    return top  # type: ignore[no-any-return]


def hooks_keep() -> bool:
    """Whether hooks may keep copies of what autograd saves, such as those of a checkpoint: none do in a trial."""
    top: Any = saved_hooks(True)
    return top is not None and not isinstance(getattr(top[0], "__self__", None), Forgetting)
