"""Checks of optimizers that need all parameters together, before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.data_parallel.update.trial import Independence
from lightning_megatron.mesh.layout import Layout
from lightning_megatron.pipeline.elsewhere.reachable import functions_of_step, names_in

_NEEDS = f"{Independence.NONE.value} (found by a trial on small matrices)"


def check_whole_steps(
    optimizers: Sequence[Optimizer], module: nn.Module, layout: Layout, *, lowered: bool, skips: bool
) -> None:
    """Refuse optimizers that need all parameters together where these are not, or a step cannot be taken back.

    Over tensor-parallel ranks they step on whole parameters, see
    :mod:`~lightning_megatron.data_parallel.update.whole_steps`.

    Args:
        optimizers: the module's.
        module: the user's.
        layout: axis sizes.
        lowered: whether layers compute with 16-bit copies of the weights.
        skips: whether updates may have to be left out.

    Raises:
        MisconfigurationException: with what to change.
    """
    names = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
    if layout.pipeline > 1:
        raise MisconfigurationException(
            f"{names} needs {_NEEDS}, but `pipeline_parallel_size={layout.pipeline}` spreads them over stages; use an "
            "optimizer that updates every parameter by itself, or `pipeline_parallel_size=1`."
        )
    if lowered:
        raise MisconfigurationException(
            f"{names} needs {Independence.NONE.value}, or calls its closure several times (found by a trial on small "
            "matrices); mixed precision updates float32 copies of the weights, which the closure does not see. Use "
            "`precision='32-true'` or 'bf16-true'."
        )
    if skips:
        raise MisconfigurationException(
            f"{names} needs {_NEEDS}, or calls its closure several times: its step cannot be left out where a gradient "
            "in its middle is not finite. Leave out `nonfinite='skip'`, and use no float16."
        )
    if layout.tensor > 1:
        _check_over_tensor_ranks(optimizers, module, layout.tensor)


def _check_over_tensor_ranks(optimizers: Sequence[Optimizer], module: nn.Module, ranks: int) -> None:
    mentioned = {name for function in functions_of_step(module) for name in names_in(function.__code__)[0]}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for name in sorted(mentioned.intersection(_own_methods(optimizer))):
            raise MisconfigurationException(
                f"`training_step` calls `{name}` of {kind}, which needs {_NEEDS}: over `tensor_parallel_size={ranks}` "
                "ranks its `step` finds whole parameters, but its other methods find slices. Give `step` a closure, "
                "as in `optimizer.step(closure)`, or use `tensor_parallel_size=1`."
            )
        groups = [group["params"] for group in optimizer.param_groups]
        for name, value in vars(optimizer).items():
            apart = not any(value is group for group in groups)
            if apart and name not in ("param_groups", "state") and _holds_parameters(value):
                raise MisconfigurationException(
                    f"{kind} keeps parameters in `{name}`, beside its `param_groups`, and needs {_NEEDS}: over "
                    f"`tensor_parallel_size={ranks}` ranks its groups hold whole parameters while it steps, and "
                    f"`{name}` would hold slices. Let it go through `self.param_groups`, or use "
                    "`tensor_parallel_size=1`."
                )


def _own_methods(optimizer: Optimizer) -> set[str]:
    """Public methods that the optimizer's own class has beside those of all optimizers."""
    kinds = (kind for kind in type(optimizer).__mro__ if issubclass(kind, Optimizer) and kind is not Optimizer)
    own = {name for kind in kinds for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}
    return own - set(dir(Optimizer))


def _holds_parameters(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_parameters, value.values())) or any(isinstance(key, nn.Parameter) for key in value)
    if isinstance(value, (nn.Parameter, nn.Module)):
        return True
    is_plain = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Tensor)) and hasattr(value, "__len__")
    return is_plain and any(isinstance(entry, (nn.Parameter, nn.Module)) for entry in value)
