"""Batch norm over the samples of all replicas, for ``Trainer(sync_batchnorm=True)``.

torch's own ``SyncBatchNorm`` needs a GPU, and by default reduces over the whole world: tensor-parallel ranks would
count several times, and other pipeline stages do not take part. This one reduces over the data group, on any device.
With n_r elements per channel, means m_r and squared deviations s_r per channel on replica r::

    n = sum n_r,   mean = sum n_r m_r / n,   var = sum (s_r + n_r (m_r - mean)²) / n
    y = (x - mean) / sqrt(var + eps) * weight + bias

which is batch norm over all samples together (Chan et al., 1979). For C channels the forward costs one all-gather of
2 C + 1 numbers, the backward one all-reduce of 2 C.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_megatron.mesh.autograd import first_order
from lightning_megatron.mesh.messages.collectives import raw_all_gather, raw_all_reduce
from lightning_megatron.mesh.pickling import HeldGroup

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


class SyncedBatchNorm(nn.SyncBatchNorm):
    """Batch norm with training statistics over all replicas. x: [batch, channels, ..] -> the same shape.

    :func:`sync_batch_norms` converts existing layers to it; evaluation is that of ``nn.BatchNorm``.
    """

    replicas: HeldGroup

    def forward(self, input: Tensor) -> Tensor:
        """input: [batch, channels, ..] -> the same shape; collective over the data group in training."""
        group = self.replicas.group
        if not self.training or group is None or group.size() == 1:
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)
        if input.is_meta or isinstance(input, FakeTensor):  # only shapes are wanted
            return torch.empty_like(input)
        mean_and_var: list[Tensor] = []
        output = cast(Tensor, _Normalized.apply(input, self.weight, self.bias, self.eps, group, mean_and_var))
        self._follow(*mean_and_var)
        return output

    @torch.no_grad()
    def _follow(self, mean: Tensor, var: Tensor) -> None:
        """Update the running statistics with those of this batch: mean [C] and unbiased variance [C]."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if factor is None else factor
        for running, found in ((self.running_mean, mean), (self.running_var, var)):
            running.mul_(1 - (factor or 0.0)).add_(found.to(running.dtype), alpha=factor or 0.0)


class _Normalized(torch.autograd.Function):
    """x, weight, bias -> y, normalized over all replicas; appends mean and unbiased variance to ``found``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
        found: list[Tensor],
    ) -> Tensor:
        wide = x.float() if x.dtype in _SIXTEEN_BIT else x
        dims = [dim for dim in range(x.dim()) if dim != 1]
        count, channels = x.numel() // max(x.shape[1], 1), x.shape[1]
        mean = wide.sum(dims) / max(count, 1)
        squares = (wide - _as(mean, x)).square().sum(dims)
        every = raw_all_gather(torch.cat([mean, squares, mean.new_full((1,), count)])[None], 0, group)
        means, deviations, counts = every.split([channels, channels, 1], dim=1)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        squares = (deviations + counts * (means - mean).square()).sum(0)
        scale = torch.rsqrt(squares / total + eps)
        found += [mean, squares / (total - 1).clamp(min=1)]
        ctx.save_for_backward(x, weight, mean, scale, total)
        ctx.group = group
        y = (wide - _as(mean, x)) * _as(scale, x)
        y = y if weight is None else y * _as(weight.to(y.dtype), x)
        return (y if bias is None else y + _as(bias.to(y.dtype), x)).to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, mean, scale, total = ctx.saved_tensors
        wide, dims = grad.to(mean.dtype), [dim for dim in range(x.dim()) if dim != 1]
        normal = (x.to(mean.dtype) - _as(mean, x)) * _as(scale, x)
        sums, products = wide.sum(dims), (wide * normal).sum(dims)
        of_all = raw_all_reduce(torch.stack([sums, products]), ctx.group) / total
        inner = wide - _as(of_all[0], x) - normal * _as(of_all[1], x)
        factor = scale if weight is None else scale * weight.to(scale.dtype)
        wanted = ctx.needs_input_grad
        return (
            (inner * _as(factor, x)).to(x.dtype) if wanted[0] else None,
            products.to(weight.dtype) if wanted[1] else None,
            sums.to(weight.dtype) if wanted[2] else None,
            None,
            None,
            None,
        )


def _as(channels: Tensor, x: Tensor) -> Tensor:
    """View [C] as [1, C, 1, ..], which broadcasts over ``x``."""
    return channels.view(1, -1, *[1] * (x.dim() - 2))


def sync_batch_norms(module: nn.Module, group: dist.ProcessGroup | None) -> list[str]:
    """Make the batch norms in ``module`` compute their statistics over ``group``, or, for ``None``, locally again.

    The layers stay the same objects and keep their hooks and names; only their class changes.

    Args:
        module: the module; changed in place.
        group: the data group.

    Returns:
        Names of batch norms with a custom forward, which stay unchanged.
    """
    left = []
    for name, child in module.named_modules():
        if isinstance(child, SyncedBatchNorm):
            child.replicas.group = group
        elif isinstance(child, _BatchNorm) and group is not None:
            if type(child).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
                left.append(name)
                continue
            layer: Any = child
            layer.__class__ = SyncedBatchNorm
            layer.process_group = None
            layer.replicas = HeldGroup(group)
    return left
