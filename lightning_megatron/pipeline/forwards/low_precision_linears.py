"""Which linears multiply 8-bit numbers (``precision="fp8-mixed"``), and where that is refused.

Only linears inside the trunk's layers do: they hold most of the work, and are followed by a residual sum or a norm.
Embeddings, the head and the loss are as in ``"bf16-mixed"``, and so are a linear whose weight (its part on this rank)
has a dim that scaled products do not take, and the projections of ``nn.MultiheadAttention``, which it multiplies
itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_megatron.layers.float8 import FLOAT8, MULTIPLE, fits, float8_linear
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.weight_view import TRANSPOSED, WHOLE, autocast_input
from lightning_megatron.pipeline.cut.trunk import find_trunk
from lightning_megatron.pipeline.forwards.stack import ForwardSlot, ForwardStack, Wrapper
from lightning_megatron.pipeline.forwards.weight_gradients import is_plain_linear, is_sharded_linear
from lightning_megatron.pipeline.stage.stage import Stage

_CAPABILITY = (8, 9)


def check_float8(device: torch.device, compile_layers: Any) -> None:
    """Refuse what cannot multiply 8-bit numbers.

    Raises:
        ValueError: the device has no such products, or layers are to be compiled.
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
    """The device in words, if it lacks products of 8-bit numbers."""
    if device.type != "cuda":
        return f"`{device}`"
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        return f"{name}, by ROCm"
    capability = torch.cuda.get_device_capability(device)
    return None if capability >= _CAPABILITY else f"{name} of capability {capability[0]}.{capability[1]}"


def multiply_in_8_bits(module: nn.Module, stage: Stage | None, wanted: bool, pipeline_layers: str) -> str:
    """Let this rank's linears in the trunk multiply 8-bit numbers, or take back what an earlier run did.

    Returns:
        What was done, for the user: how many do, and which ones stay in 16 bits; empty where none was to.

    Raises:
        ValueError: no trunk is found, or none of the linears in this rank's layers fits.
    """
    for child in module.modules():
        _restore(child)
    if not wanted:
        return ""
    trunk = stage.partition.trunk if stage is not None else find_trunk(module, pipeline_layers)
    owned = stage.partition.layers_of(stage.stage) if stage is not None else range(len(trunk.layer_names))
    chosen: list[tuple[str, Any]] = []
    kept: list[tuple[str, Any]] = []
    for name, linear in _linears(module, [trunk.layer_names[index] for index in sorted(owned)]):
        (chosen if fits(*_shape(linear)) else kept).append((name, linear))
    listed = ", ".join(f"`{name}` {list(_shape(linear))}" for name, linear in kept)
    if owned and not chosen:
        raise ValueError(
            f"`precision='fp8-mixed'` finds no linear in the layers of `{trunk.name}` on this rank whose dims are "
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
    """Whether a module is a linear of which this rank holds all, and runs the forward of its class."""
    whole = is_plain_linear(module) or (isinstance(module, RowParallelLinear) and module._sharding is None)
    return whole and ForwardStack.of(module).runs_class_forward


def _shape(linear: Any) -> tuple[int, ...]:
    """Of the weight that is multiplied here."""
    weight = linear.local_weight() if hasattr(linear, "local_weight") else linear.weight
    return tuple(weight.shape)


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
    """Multiplies 8-bit numbers for a whole linear (``nn.Linear``, or one that holds its weight as [in, out]).

    x: [.., in] -> [.., out].
    """

    slot = ForwardSlot.PRODUCTS

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._operand = WHOLE if isinstance(module, nn.Linear) else TRANSPOSED

    def __call__(self, x: Tensor) -> Tensor:
        if type(x) not in (Tensor, nn.Parameter):  # asked for shapes only
            return cast(Tensor, self.forward(x))
        return float8_linear(autocast_input(x), self.module.weight, self.module.bias, self._operand)
