"""Refuses two parameters on the same memory where ranks would make two tensors of it.

``self.head.weight.data = self.embed.weight.data`` leaves two parameters, each with a gradient and with states of its
own; an optimizer's updates of both end in the one tensor. Ranks that share out updates, weights or layers give each
parameter memory of its own, so the two would part at the first step. One parameter under two names
(``self.head.weight = self.embed.weight``) is something else: it is kept as one at every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_megatron.data_parallel.gradient_options import GradientOptions
from lightning_megatron.mesh.layout import Layout

_divided: WeakKeyDictionary[nn.Module, tuple[str, str]] = WeakKeyDictionary()
"""Two such parameters of modules that were divided by runs without training, in which it does not matter."""


def check_shared_memory(module: nn.Module, layout: Layout, options: GradientOptions, fits: bool, again: bool) -> None:
    """Refuse to train parameters that share memory, unless every rank updates all of them in place.

    Args:
        module: whole, or divided by an earlier run.
        layout: of the run.
        options: where weights lie, and who updates them.
        fits: whether the run trains.
        again: whether an earlier run of the strategy has divided the module.

    Raises:
        MisconfigurationException: with the two names, and what to write instead.
    """
    divides = layout.pipeline * layout.tensor * options.experts > 1 or (layout.world_size > 1 and options.sharding)
    divides = divides or options.offload is not None or options.layer_dtype is not None
    if divides and not again and (pair := next(parameters_on_one_memory(module), None)) is not None:
        _divided[module] = pair
    if fits and module in _divided:
        first, second = _divided[module]
        raise MisconfigurationException(
            f"`{first}` and `{second}` are two parameters on the same memory, which an optimizer changes twice in a "
            "step, and ranks that divide weights or their updates would keep two tensors. Make them one parameter "
            "(`self.head.weight = self.embed.weight`, and in PEFT no `ensure_weight_tying`), give each its own "
            "(`.clone()`), or use replicas alone, with `optimizer_sharding=False`."
        )


def parameters_on_one_memory(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of parameters that have an element in common, of which one trains at least.

    Args:
        module: whole; parameters on the meta device, and those of other classes (DTensors), are left out.
    """
    places: dict[int, list[tuple[int, int, str, nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        if type(parameter) is not nn.Parameter or parameter.is_meta or not parameter.numel():
            continue
        start = parameter.data_ptr()
        near = places.setdefault(parameter.untyped_storage().data_ptr(), [])
        for first, last, other, held in near:
            trains = parameter.requires_grad or held.requires_grad
            if trains and start <= last and first <= start + _reach(parameter) and _meet(held, parameter):
                yield other, name
        near.append((start, start + _reach(parameter), name, parameter))


def _reach(tensor: Tensor) -> int:
    """Bytes from its first element to its last."""
    return tensor.element_size() * sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))


def _meet(one: Tensor, other: Tensor) -> bool:
    """Whether two views of a storage have an element in common; columns of one matrix lie between each other."""
    if one.data_ptr() == other.data_ptr() or one.element_size() != other.element_size():
        return True
    base = min(one.storage_offset(), other.storage_offset())
    end = max(tensor.storage_offset() + _reach(tensor) // tensor.element_size() for tensor in (one, other))
    marks = torch.zeros(int(end - base) + 1, dtype=torch.bool)
    seen = [marks.as_strided(each.shape, each.stride(), each.storage_offset() - base) for each in (one, other)]
    seen[0].fill_(True)
    return bool(seen[1].any())
