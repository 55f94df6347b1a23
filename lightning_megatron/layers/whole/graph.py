"""Rules for autograd's own functions and for those that reach past a tensor, to its memory.

A hook, a ``.grad`` or a gradient asked of a split tensor is that of its part, shown whole. Addresses and storages of
a tensor without memory of its own are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.layers.whole.base import Rule, WholeTensor
from lightning_megatron.mesh.torch_functions import getters, setters


def _of_local(func: Any, model: WholeTensor, *args: Any) -> Any:
    """Questions about the graph, which the local part answers."""
    return func(model.local(), *args)


def _format(func: Any, model: WholeTensor, spec: str) -> str:
    """Printing must not communicate: it is often done on one rank only."""
    return repr(model)


def _register_hook(func: Any, model: WholeTensor, hook: Callable[[Tensor], Any]) -> Any:
    """The hook is given the gradient with its global shape, and may return one."""

    def on_part(grad: Tensor) -> Tensor | None:
        changed = hook(model.like(grad))
        return None if changed is None else _part(model, changed)

    return func(model.local(), on_part)


def _part(model: WholeTensor, value: Tensor) -> Tensor:
    """The local part, padding included, of a tensor of this shape."""
    if isinstance(value, WholeTensor) and model.alike(value):
        return value.local()
    whole = value.full() if isinstance(value, WholeTensor) else value
    return model.spread.take(whole, model.along, model.local().shape[model.along])


def _grad(func: Any, model: WholeTensor, *owner: Any) -> WholeTensor | None:
    grad = model.local().grad
    return None if grad is None else model.like(grad)


def _set_grad(func: Any, model: WholeTensor, value: Tensor | None) -> None:
    model.local().grad = None if value is None else _part(model, value).detach().clone()


def _data(func: Any, model: WholeTensor, *owner: Any) -> WholeTensor:
    return model.like(model.local().data)


def _set_data(func: Any, model: WholeTensor, value: Tensor) -> None:
    if value.shape != model.shape:
        raise RuntimeError(
            f"`.data` of shape {tuple(value.shape)} cannot be given to a tensor of shape {tuple(model.shape)} that is "
            "split over ranks: its shape must stay."
        )
    model.local().data = _part(model, value).detach().to(model.dtype).clone()


def _requires_grad(func: Any, model: WholeTensor, value: bool = True) -> WholeTensor:
    """Make a leaf of the local part, and follow in the graph above it."""
    if not value and not model.local().is_leaf:
        raise RuntimeError("only leaf tensors can be told not to require a gradient; use `detach()`.")
    model.local().requires_grad_(value)
    model.changed()
    return model


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) else [value]


def _roots(outputs: Any, gradients: Any) -> tuple[list[Any], list[Any] | None]:
    """Roots of a backward, with the parts of split tensors and of their gradients."""
    several = _listed(outputs)
    if gradients is None:
        if any(isinstance(value, WholeTensor) for value in several):
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return several, None
    given = _listed(gradients)
    parts = [value.local() if isinstance(value, WholeTensor) else value for value in several]
    return parts, [
        _part(value, grad) if isinstance(value, WholeTensor) else grad.full() if isinstance(grad, WholeTensor) else grad
        for value, grad in zip(several, given, strict=True)
    ]


def _differentiate(func: Any, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``torch.autograd.grad``: gradients of split inputs are split."""
    roots, gradients = _roots(outputs, grad_outputs)
    parts = [value.local() if isinstance(value, WholeTensor) else value for value in _listed(inputs)]
    found = func(roots, parts, gradients, *args, **kwargs)
    return tuple(
        value.like(grad) if isinstance(value, WholeTensor) and grad is not None else grad
        for value, grad in zip(_listed(inputs), found, strict=True)
    )


def _backward(func: Any, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    """``torch.autograd.backward``, and the method of a tensor."""
    roots, gradients = _roots(tensors, kwargs.pop("gradient", grad_tensors))
    torch.autograd.backward(roots, gradients, *args, **kwargs)


def _numpy(func: Any, model: WholeTensor, *args: Any, **kwargs: Any) -> Any:
    """A gathered copy, which cannot be written: the split tensor would not change."""
    array = func(model.full(), *args, **kwargs)
    array.setflags(write=False)
    return array


def _refuse(func: Any, model: WholeTensor, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"`{getattr(func, '__name__', func)}` reaches for the memory of {model!r}, which has none of its own: its "
        f"values are split over {model.spread.group.size()} ranks. Use `logits.full()` for the whole tensor, "
        "`logits.local()` for this rank's part, or `tensor_parallel_plan` to leave its layer whole."
    )


T = Tensor
RULES: dict[Any, Rule] = {
    **dict.fromkeys(getters("requires_grad", "grad_fn", "is_leaf", "retains_grad"), _of_local),
    T.__format__: _format,
    T.register_hook: _register_hook,
    T.retain_grad: _of_local,
    **dict.fromkeys(getters("grad"), _grad),
    **dict.fromkeys(setters("grad"), _set_grad),
    **dict.fromkeys(getters("data"), _data),
    **dict.fromkeys(setters("data"), _set_data),
    **dict.fromkeys((T.requires_grad_, *setters("requires_grad")), _requires_grad),
    torch.autograd.grad: _differentiate,
    **dict.fromkeys((torch.autograd.backward, T.backward), _backward),
    T.numpy: _numpy,
    **dict.fromkeys((T.data_ptr, T.untyped_storage, T.storage, T.storage_offset, T.set_, T.resize_), _refuse),
    **dict.fromkeys((T.__dlpack__, T.share_memory_, T.as_strided, T.as_strided_, T.detach_), _refuse),
}
