"""Precision plugins that clip by the norm over the whole model.

Lightning hands the strategy one of its own plugins; the strategy swaps it for the one here of the same name. The only
difference is gradient clipping, which must see the gradients of all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.data_parallel.norm import clip_by_norm

NormOf = Callable[[Iterable[Any]], Tensor]


class _GlobalClip:
    """Mixin: clips by the global norm that the strategy computes."""

    norm_of: NormOf | None = None

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip the gradients of ``optimizer`` by their norm over all stages."""
        assert self.norm_of is not None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = self.norm_of(parameters)
        clip_by_norm([p.grad for p in parameters if p.grad is not None], norm, float(clip_val))


class MegatronPrecision(_GlobalClip, Precision):  # type: ignore[misc]
    """``precision="32-true"``."""


class MegatronDoublePrecision(_GlobalClip, DoublePrecision):  # type: ignore[misc]
    """``precision="64-true"``."""


class MegatronHalfPrecision(_GlobalClip, HalfPrecision):  # type: ignore[misc]
    """``precision="bf16-true"``."""


def megatron_precision(plugin: Precision | None) -> Precision:
    """The counterpart of one of Lightning's precision plugins.

    Raises:
        ValueError: a precision this strategy does not train with.
    """
    if plugin is None or type(plugin) is Precision:
        return MegatronPrecision()
    if isinstance(plugin, _GlobalClip):
        return plugin  # type: ignore[return-value]
    if type(plugin) is DoublePrecision:
        return MegatronDoublePrecision()
    if type(plugin) is HalfPrecision and plugin.precision == "bf16-true":
        return MegatronHalfPrecision("bf16-true")
    raise ValueError(
        f"`precision={getattr(plugin, 'precision', type(plugin).__name__)!r}` is not supported by MegatronStrategy; "
        "use '32-true', '64-true' or 'bf16-true'."
    )
