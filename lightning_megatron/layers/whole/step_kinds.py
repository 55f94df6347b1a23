"""Classes that a split parameter, its data and its gradient have while a step runs; see `StepView`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from lightning_megatron.layers.whole import WholeTensor
from lightning_megatron.layers.whole.gathered_views import ShownFirst
from lightning_megatron.layers.whole.seen_kinds import NATIVE


class ShowsInStep(Protocol):
    """The interface of a `StepView` that these classes use."""

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function of torch that was given a parameter on what one process has in its place."""

    def part_of_copy(self, parameter: Tensor) -> nn.Parameter:
        """A deep copy of this rank's part."""


class InStep(ShownFirst, torch.Tensor):
    """A part that the code of a step sees as the whole; functions of torch ask the `StepView` what that is."""

    _owner: ClassVar[ShowsInStep]

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NATIVE or func in _HOOKS or torch._C._current_graph_task_id() != -1:  # a backward reads parts
            return as_they_are(func, args, kwargs or {})
        return cls._owner.answer(func, args, kwargs or {})


class StepParameter(InStep, nn.Parameter):
    """A parameter while the code of a step runs."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self._owner.part_of_copy(self)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        whole = plain(self.detach())
        return nn.Parameter(whole.clone(), self.requires_grad).__reduce_ex__(protocol)


class StepTensor(InStep):
    """The data or gradient of a parameter that is gathered when it is read; it can be written into.

    Attributes:
        entry: the parameter.
        part: this rank's part of it, the very tensor.
        is_gradient: whether it is a gradient.
    """

    entry: Any
    part: Tensor
    is_gradient: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


class GivenData:
    """``data`` of parameters. Torch asks the tensor that is given to them nothing, and would look for its memory."""

    def __get__(self, parameter: nn.Parameter | None, owner: type) -> Any:
        return self if parameter is None else _DATA.__get__(parameter, owner)

    def __set__(self, parameter: nn.Parameter, value: Any) -> None:
        _DATA.__set__(parameter, plain(value) if isinstance(value, WholeTensor) else value)


class CountedOnce(torch.autograd.Function):
    """The gradient of what all ranks compute alike, as a term on the first rank."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, rank: int) -> Tensor:
        ctx.counts = rank == 0
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad if ctx.counts else torch.zeros_like(grad), None


def part_shown(tensor: Tensor) -> Tensor:
    """The very tensor on this rank that a gradient shown whole stands for; any other as it is."""
    if isinstance(tensor, StepTensor):
        return tensor.part
    return tensor.local() if isinstance(tensor, WholeTensor) else tensor


def as_they_are(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function of torch on the parts themselves."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def plain(value: Tensor) -> Tensor:
    """An ordinary tensor, gathered if it has to be."""
    return value.full().detach() if isinstance(value, WholeTensor) else value.detach().as_subclass(Tensor)


_HOOKS = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad}
_DATA: Any = Tensor.data
