"""Updates on CPU by torch's fused kernels, where the optimizer leaves the choice of kernel to torch.

torch's own choice on CPU is a loop over parameters, a dozen small operations each. The fused kernel does the same
arithmetic for all of them in one pass: in float64 to the bit, in float32 to the last one. An optimizer made with
``foreach=`` or ``fused=`` keeps what it was given, and on GPUs torch's choice stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

_FUSED = (Adam, AdamW, SGD, Adagrad)
_DTYPES = (torch.float32, torch.float64)


@contextmanager
def fused_update(optimizer: Optimizer, closure: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Have the update that follows ``closure`` done by fused kernels; the groups' options are back afterwards.

    The first update, which makes the optimizer's state, is torch's, so that the state is what it would be.

    Args:
        optimizer: about to step.
        closure: what it is to call first.

    Returns:
        The closure to hand to its ``step``.
    """
    switched: list[dict[str, Any]] = []

    def compute() -> Any:
        result = closure()
        switched.extend(group for group in optimizer.param_groups if _may_be_fused(optimizer, group))
        for group in switched:
            group["fused"] = True
        return result

    try:
        yield compute
    finally:
        for group in switched:
            group["fused"] = None


def _may_be_fused(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    kind = type(optimizer)
    left_open = group.get("fused", False) is None and group.get("foreach") is None
    plain = not group.get("capturable") and not group.get("differentiable") and not isinstance(group["lr"], Tensor)
    if kind not in _FUSED or not left_open or not plain or not (optimizer.state or kind is SGD):
        return False
    if kind is SGD and group["momentum"] != 0:  # its kernel wants momentum of all parameters or of none
        return False
    return all(_is_plain(parameter) for parameter in group["params"])


def _is_plain(parameter: Tensor) -> bool:
    dense = parameter.grad is None or not parameter.grad.is_sparse
    return type(parameter) is nn.Parameter and parameter.is_cpu and parameter.dtype in _DTYPES and dense
