"""Precision plugins that clip by the norm over the whole model.

Lightning hands the strategy one of its own plugins; the strategy swaps it for the one here of the same name. The only
difference is gradient clipping, which must see the gradients of all stages and replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch.optim import Optimizer

from lightning_megatron.data_parallel.global_norm import clip_by
from lightning_megatron.data_parallel.model_gradients import ModelGradients
from lightning_megatron.data_parallel.update.loss_scale import LossScale


class _GlobalClip:
    """Mixin: clips by the global norm of a run's gradients."""

    _gradients: ModelGradients | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the gradients of the run: a copy is in none."""
        return self.__dict__ | {"_gradients": None}

    @property
    def gradients(self) -> ModelGradients:
        """Those of the run that this plugin is used in.

        Raises:
            RuntimeError: there is no run.
        """
        if self._gradients is None:
            raise RuntimeError("gradients are clipped while MegatronStrategy trains, and it does not.")
        return self._gradients

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip the gradients of ``optimizer`` by their norm over all stages."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.gradients.change(parameters, clip_by(self.gradients.norm(parameters), float(clip_val)))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip every element of the gradients that this rank holds."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.gradients.change(parameters, lambda gradient: gradient.clamp_(-clip_val, clip_val))


def clips_gradients_of(plugin: Precision, gradients: ModelGradients | None) -> None:
    """Let a plugin of this package clip these gradients; none, when their run ends."""
    if isinstance(plugin, _GlobalClip):
        plugin._gradients = gradients


class MegatronPrecision(_GlobalClip, Precision):  # type: ignore[misc]
    """``precision="32-true"``."""


class MegatronDoublePrecision(_GlobalClip, DoublePrecision):  # type: ignore[misc]
    """``precision="64-true"``."""


class MegatronHalfPrecision(_GlobalClip, HalfPrecision):  # type: ignore[misc]
    """``precision="bf16-true"``."""


class MegatronMixedPrecision(_GlobalClip, Precision):  # type: ignore[misc]
    """``precision="bf16-mixed"`` and ``"16-mixed"``: layers compute in 16 bits, the optimizer keeps float32.

    Linears, convolutions and embeddings hold 16-bit weights; gradients are accumulated, summed and applied in float32.
    ``"fp8-mixed"`` is ``"bf16-mixed"`` but for the products of the linears in the trunk's layers, which are of 8-bit
    numbers; see `lightning_megatron.layers.multiply.float8`.

    Args:
        precision: ``"bf16-mixed"``, ``"16-mixed"`` or ``"fp8-mixed"``.
        device: type of device for ``torch.autocast``.
        loss_scale: of ``"16-mixed"``, to start from.
    """

    def __init__(self, precision: str, device: str, loss_scale: LossScale | None = None) -> None:
        if precision not in ("bf16-mixed", "16-mixed", "fp8-mixed"):
            raise ValueError(f"`precision={precision!r}` must be 'bf16-mixed', '16-mixed' or 'fp8-mixed'.")
        if precision != "16-mixed" and loss_scale is not None:
            raise ValueError("`loss_scale` is for `precision='16-mixed'`; bfloat16 does not need one.")
        self.precision = precision  # type: ignore[assignment]
        self.device = device
        self.layer_dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
        self.loss_scale = (loss_scale or LossScale()) if precision == "16-mixed" else None

    @contextmanager
    def forward_context(self) -> Iterator[None]:  # type: ignore[override]
        """Compute in 16 bits where that is safe."""
        with torch.autocast(self.device, dtype=self.layer_dtype, cache_enabled=False):
            yield

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, for a checkpoint."""
        return self.loss_scale.state_dict() if self.loss_scale is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved loss scale."""
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state_dict)


def _of_mixed(plugin: MixedPrecision) -> MegatronMixedPrecision:
    """With the settings of a ``GradScaler`` that the user gave."""
    scale, scaler = None, plugin.scaler
    if scaler is not None:
        scale = LossScale(
            scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        )
    return MegatronMixedPrecision(plugin.precision, plugin.device, scale)


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
    if type(plugin) is MixedPrecision:
        return _of_mixed(plugin)
    raise ValueError(
        f"`precision={getattr(plugin, 'precision', type(plugin).__name__)!r}` is not supported by MegatronStrategy; "
        "use '32-true', '64-true', 'bf16-true', 'bf16-mixed' or '16-mixed'; for float8 pass "
        "`MegatronStrategy(precision_plugin=MegatronMixedPrecision('fp8-mixed', 'cuda'))`."
    )
