"""Chooses the linears that compute 8-bit products (``precision="fp8-mixed"``), and refuses devices without them.

Only linears inside the trunk's layers do: they do most of the work, and are followed by a residual sum or a norm.
Embeddings, the head and the loss run as in ``"bf16-mixed"``. So do linears whose weight on this rank has a dim that
scaled products do not support, and the projections of ``nn.MultiheadAttention``, which are not computed by linears.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.multiply.float8 import FLOAT8, MULTIPLE, fits, float8_linear
from lightning_megatron.layers.multiply.weight_view import TRANSPOSED, WHOLE, autocast_input
from lightning_megatron.pipeline.cut.trunk import LayersHere
from lightning_megatron.pipeline.forwards.stack import ForwardSlot, ForwardStack, Wrapper
from lightning_megatron.pipeline.forwards.weight_gradients import is_plain_linear, is_sharded_linear

_CAPABILITY = (8, 9)


def check_float8(device: torch.device, compile_layers: Any) -> None:
    """Refuse devices and options that do not go with 8-bit products.

    Raises:
        ValueError: the device has no 8-bit products, or layers are to be compiled.
    """
    found = _lack(device)
    if found is not None:
        raise ValueError(
            f"`precision='fp8-mixed'` needs an NVIDIA GPU of compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]} or "
            f"more (Ada, Hopper, Blackwell), but this rank runs on {found}; use `precision='bf16-mixed'`."
        )
    if compile_layers is not False:
        raise ValueError(
            f"`compile_layers={compile_layers!r}` does not go with `precision='fp8-mixed'`: use "
            "`compile_layers=False` or `precision='bf16-mixed'`."
        )


def _lack(device: torch.device) -> str | None:
    """Name of the device if it lacks 8-bit products, else ``None``."""
    if device.type != "cuda":
        return f"`{device}`"
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        return f"{name}, by ROCm"
    capability = torch.cuda.get_device_capability(device)
    return None if capability >= _CAPABILITY else f"{name} of capability {capability[0]}.{capability[1]}"


def multiply_in_8_bits(here: LayersHere, wanted: bool) -> str:
    """Make this rank's linears in the trunk compute 8-bit products, or restore them after an earlier run.

    Args:
        here: this rank's layers.
        wanted: whether 8-bit products are asked for; if not, linears are only restored.

    Returns:
        A message for the user: how many linears compute in 8 bits, and which stay in 16 bits; empty if not ``wanted``.

    Raises:
        ValueError: no trunk is found, or none of the linears in this rank's layers fits.
    """
    for child in here.module.modules():
        _restore(child)
    if not wanted:
        return ""
    owned = list(here.names)
    chosen: list[tuple[str, Any]] = []
    kept: list[tuple[str, Any]] = []
    for name, linear in _linears(here.module, owned):
        (chosen if fits(*_shape(linear)) else kept).append((name, linear))
    listed = ", ".join(f"`{name}` {list(_shape(linear))}" for name, linear in kept)
    if owned and not chosen:
        raise ValueError(
            f"`precision='fp8-mixed'` finds no linear in the layers of `{here.trunk.name}` on this rank whose dims are "
            f"multiples of {MULTIPLE}; there are {listed or 'none at all'}. Use `precision='bf16-mixed'`."
        )
    for _, linear in chosen:
        _install(linear)
    return f"fp8-mixed: {len(chosen)} linears on this rank multiply 8-bit numbers" + (
        f"; in 16 bits, as a dim is no multiple of {MULTIPLE}: {listed}." if kept else "."
    )


def _linears(module: nn.Module, layers: list[str]) -> Iterator[tuple[str, Any]]:
    for layer in layers:
        children = dict(module.get_submodule(layer).named_modules(prefix=layer))
        inside = {
            id(part)
            for child in children.values()
            if isinstance(child, nn.MultiheadAttention)
            for part in child.children()
        }
        for name, child in children.items():
            if id(child) not in inside and (_is_whole(child) or is_sharded_linear(child)):
                yield name, child


def _is_whole(module: nn.Module) -> bool:
    """Whether a module is an unsplit linear that runs the forward of its class."""
    whole = is_plain_linear(module) or (isinstance(module, RowParallelLinear) and module._sharding is None)
    return whole and ForwardStack.of(module).runs_class_forward


def _shape(linear: Any) -> tuple[int, ...]:
    """Shape of the weight that this rank multiplies by."""
    if hasattr(linear, "local_weight"):
        return tuple(linear.local_weight().shape)
    if isinstance(linear, nn.Linear):  # whose weight may be computed at each reading: a spectral norm goes on then
        return linear.out_features, linear.in_features
    return tuple(linear.weight.shape)


def _install(linear: Any) -> None:
    if _is_whole(linear):
        Float8Call(linear).install()
    else:
        linear.products = FLOAT8


def _restore(child: Any) -> None:
    if isinstance(child, (ColumnParallelLinear, RowParallelLinear)):
        child.__dict__.pop("products", None)
    ForwardStack.of(child).remove(ForwardSlot.PRODUCTS)


class Float8Call(Wrapper):
    """Computes the 8-bit products of an unsplit linear (``nn.Linear``, or one that stores its weight as [in, out]).

    x: [.., in] -> [.., out].
    """

    slot = ForwardSlot.PRODUCTS

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._operand = WHOLE if isinstance(module, nn.Linear) else TRANSPOSED

    def __call__(self, x: Tensor) -> Tensor:
        if type(x) not in (Tensor, nn.Parameter):  # not a plain tensor: only shapes are wanted
            return cast(Tensor, self.forward(x))
        return float8_linear(autocast_input(x), self.module.weight, self.module.bias, self._operand)
