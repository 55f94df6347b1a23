"""Classes that a split parameter and its gradient have while a hook runs; see `WholeView`.

A tensor that is *seen* answers questions about its shape at once, changes every element alike where it is, and becomes
whole in any other function of torch. A *gathered* parameter is an ordinary whole tensor but for being copied: what a
layer's copy computes with is a part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.layers.whole import pointwise
from lightning_megatron.layers.whole.parameter_parts import ParameterParts
from lightning_megatron.mesh.messages.collectives import raw_all_reduce
from lightning_megatron.mesh.parts.packages import PACKAGE, comes_from
from lightning_megatron.mesh.torch_functions import getters, setters


class ShowsBetween(Protocol):
    """The interface of a `WholeView` that these classes use."""

    def touch(self, tensor: Tensor) -> None:
        """Gather a tensor whose values are about to be read."""

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """The gradient of a parameter, to be gathered when it is read."""

    def are_alike(self, one: Tensor, other: Tensor) -> bool:
        """Whether two tensors are split in the same way, so that an update may run on their parts."""

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape of the whole tensor."""

    def change_part(self, func: Any, tensor: Tensor, args: Any, kwargs: Any) -> bool:
        """Run a function that changes each element by itself on the part; ``False`` if an operand cannot be cut so."""

    def on_parts(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """The result of a function of each element by itself, of the parts; ``None`` if operands cannot be cut so."""

    def copied(self, parameter: nn.Parameter) -> nn.Parameter:
        """A deep copy of a parameter: of this rank's part, which a copied layer computes with."""

    def hooked(self, parameter: nn.Parameter, hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """A hook on the whole gradient, as one on this rank's part."""


class Seen:
    """Mixin: a tensor that becomes whole when it is touched."""

    _owner: ClassVar[ShowsBetween]

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in NATIVE or torch._C._current_graph_task_id() != -1:  # a backward computes with parts
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, Seen):
            if func in SHAPE:
                return func(torch.empty(first._owner.shape_of(first), device="meta"), *args[1:], **kwargs)  # type: ignore[arg-type]
            if func in EVERY_ELEMENT and first._owner.change_part(func, first, args[1:], kwargs):  # type: ignore[arg-type]
                return first
        elif func in _EVERY_LIST and all(cls._meets(first, value) for value in args[1:]):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return cls._on_whole(func, args, kwargs)

    @classmethod
    def _meets(cls, tensors: Any, value: Any) -> bool:
        """Whether an operand changes every element of the tensors alike: a number, or tensors that are cut alike."""
        if not isinstance(value, list | tuple):
            return not isinstance(value, Tensor) or value.ndim == 0
        return all(
            isinstance(one, Seen) == isinstance(other, Seen)
            and (not isinstance(one, Seen) or cls._owner.are_alike(one, other))  # type: ignore[arg-type]
            for one, other in zip(tensors, value, strict=True)
        )

    @classmethod
    def _on_whole(cls, func: Any, args: Any, kwargs: Any) -> Any:
        for tensor in seen_among((*args, *kwargs.values())):
            tensor._owner.touch(tensor)  # type: ignore[attr-defined]
        return func(*args, **kwargs)


class _SeenTensor(Seen, torch.Tensor):
    def __deepcopy__(self, memo: Any) -> Any:
        self._owner.touch(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._owner.touch(self)
        return self.__reduce_ex__(protocol)


class _HeldTensor(_SeenTensor):
    """A tensor that steps may compute with element by element, on the parts, and not read."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in pointwise.RULES and func not in EVERY_ELEMENT:
            made = cls._owner.on_parts(func, args, kwargs or {})
            if made is not None:
                return made
        return super().__torch_function__(func, types, args, kwargs)


class _Copied:
    """Mixin: how a parameter is copied, kept, and told of gradients."""

    _owner: ClassVar[ShowsBetween]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self._owner.copied(self)  # type: ignore[arg-type]
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._owner.touch(self)  # type: ignore[arg-type]
        return nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)  # type: ignore[attr-defined]

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """The hook is given the whole gradient."""
        return torch.Tensor.register_hook(self, self._owner.hooked(self, hook))  # type: ignore[arg-type, no-untyped-call]


class _SeenParameter(_Copied, Seen, nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(args[0] if args else None, _SeenParameter):
            if func == _GET_GRAD:
                return args[0]._owner.gradient(args[0])
            if (func is _SET_GRAD and args[1] is None) or func is _REGISTER:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args)
        return super().__torch_function__(func, types, args, kwargs)


class _GatheredParameter(_Copied, nn.Parameter):
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class Kinds:
    """The classes of one view.

    Attributes:
        parameter: of a parameter that is seen.
        gathered: of a parameter that was touched.
        tensor: of a gradient that is seen.
        held: of another tensor in a step.
    """

    def __init__(self, view: ShowsBetween) -> None:
        self.parameter = type("SeenParameter", (_SeenParameter,), {"_owner": view})
        self.gathered = type("GatheredParameter", (_GatheredParameter,), {"_owner": view})
        self.tensor = type("SeenTensor", (_SeenTensor,), {"_owner": view})
        self.held = type("HeldTensor", (_HeldTensor,), {"_owner": view})


class WholeGradientHook:
    """A gradient hook of a split parameter, which is given the whole gradient; a collective in every backward.

    Args:
        parts: how the parameter is split.
        hook: the user's.

    Attributes:
        given: the user's hook.
    """

    def __init__(self, parts: ParameterParts, hook: Callable[[Tensor], Any]) -> None:
        self._parts, self.given = parts, hook

    def __call__(self, part: Tensor) -> Tensor | None:
        changed = answer_of(self.given, self._parts.gather(part))
        return None if changed is None else self._parts.cut(changed)


class SummedGradientHook:
    """A gradient hook of a parameter of which every rank computes a term of the gradient: it is given the sum.

    Terms are summed over the group once more before they are used; so one rank answers for all.

    Args:
        group: the tensor group.
        hook: the user's.

    Attributes:
        given: the user's hook.
    """

    def __init__(self, group: dist.ProcessGroup, hook: Callable[[Tensor], Any]) -> None:
        self._group, self.given = group, hook

    def __call__(self, term: Tensor) -> Tensor | None:
        changed = answer_of(self.given, raw_all_reduce(term.detach(), self._group))
        if changed is None:
            return None
        return changed if self._group.rank() == 0 else torch.zeros_like(changed)


def user_hook(hook: Any) -> Callable[[Tensor], Any] | None:
    """A gradient hook as the user gave it; ``None`` for one of this package's own."""
    if isinstance(hook, WholeGradientHook | SummedGradientHook):
        return hook.given
    return None if comes_from(hook, PACKAGE) else hook


def answer_of(hook: Callable[[Tensor], Any], gradient: Tensor) -> Tensor | None:
    """Result of a gradient hook, or the gradient that it changed in place; ``None`` if it did neither."""
    before = gradient._version
    changed: Tensor | None = hook(gradient)
    return gradient if changed is None and gradient._version != before else changed


def seen_among(values: Any) -> list[Tensor]:
    """Tensors that are seen, among arguments and in lists and tuples of them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Seen):
            found.append(value)  # type: ignore[arg-type]
        elif isinstance(value, list | tuple):
            found += seen_among(value)
    return found


def gather_others(tensors: Iterable[Tensor]) -> None:
    """Gather those that are seen, and are no parameters, such as an optimizer's moments."""
    for tensor in tensors:
        if isinstance(tensor, Seen) and not isinstance(tensor, nn.Parameter):
            tensor._owner.touch(tensor)


T = Tensor
_GET_GRAD, _SET_GRAD = getters("grad")[0], setters("grad")[0]
_REGISTER = T.register_hook
SHAPE = {
    *getters("shape", "ndim", "nbytes"),
    *(T.size, T.dim, T.numel, T.nelement, T.ndimension, T.__len__, T.stride, T.is_contiguous, torch.numel),
}
NATIVE = {
    *getters("dtype", "device", "layout", "is_cuda", "is_cpu", "is_sparse", "is_meta", "is_quantized", "requires_grad"),
    *getters("grad_fn", "is_leaf", "_version", "_backward_hooks", "is_nested", "is_mkldnn", "retains_grad", "itemsize"),
    *setters("requires_grad", "_backward_hooks"),
    *(T.requires_grad_, T.__hash__, T.is_floating_point, T.is_complex, T.element_size, T.get_device),
    *(torch.is_floating_point, torch.is_complex),
}
EVERY_ELEMENT = {
    *(T.abs_, T.add_, T.addcdiv_, T.addcmul_, T.clamp_, T.copy_, T.div_, T.exp_, T.fill_, T.lerp_, T.mul_, T.neg_),
    *(T.pow_, T.sign_, T.sqrt_, T.square_, T.sub_, T.tanh_, T.zero_, T.nan_to_num_, T.masked_fill_),
    *(T.__iadd__, T.__imul__, T.__isub__, T.__itruediv__, T.__ipow__),
}
_EVERY_LIST = {
    *(torch._foreach_mul_, torch._foreach_div_, torch._foreach_add_, torch._foreach_sub_, torch._foreach_zero_),
    *(torch._foreach_lerp_, torch._foreach_copy_),
}
