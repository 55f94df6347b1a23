"""Counts the floating-point operations of one step's forwards, on the rank that runs them.

What all ranks compute is added up, so a matrix that tensor ranks share counts once, and one that each of them keeps
whole is divided by their number. The backward is taken as twice the forward (Korthikanti et al., arXiv 2205.05198,
appendix A), and what is recomputed in it does not count: these are model FLOPs, as in MFU. A forward without gradients
counts as if it had them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from lightning_megatron.mesh.autograd import in_backward

FORWARD_AND_BACKWARD = 3
_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class StepFlops(TorchDispatchMode):
    """Context around a step. Products, convolutions and fused attention count; the rest is small beside them.

    Args:
        shared: address of a weight -> ranks that all compute its products whole.

    Attributes:
        forward: FLOPs of forwards so far.
    """

    def __init__(self, shared: dict[int, int]) -> None:
        super().__init__()
        self._shared = shared
        self.forward = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not in_backward():
            flops = _flops(func._overloadpacket, args, kwargs, result)
            if flops:
                self.forward += flops / max(self._shared.get(_address(leaf), 1) for leaf in tree_leaves(args))
        return result


def _flops(operation: Any, args: Any, kwargs: Any, result: Any) -> int:
    if operation is _ON_CPU:
        return int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    count = flop_registry.get(operation)
    return int(count(*args, **kwargs, out_val=result)) if count is not None else 0


def _address(value: Any) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) and value.numel() else 0
