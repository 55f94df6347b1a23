"""Decides between backward and update whether weights are updated; the decision is the same on every rank.

::

    16-mixed     an overflow anywhere skips the update everywhere and lowers the loss scale
    "skip"       a loss or gradient that is not finite skips the update everywhere
    "raise"      a loss or gradient that is not finite raises one error on every rank, which names its origin
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from lightning_megatron.data_parallel.finite import NonFiniteError, RankFinding, agree_on_overflow, largest, worst
from lightning_megatron.data_parallel.model_gradients import ModelGradients
from lightning_megatron.data_parallel.update.loss_scale import LossScale

NonFinite = Literal["raise", "skip"] | None


class StepGuard:
    """Checks the summed gradients of a step, and skips its update or raises.

    Args:
        gradients: of the module.
        device: this rank's device.
        rank: global rank.
        place: its coordinates, in words.
        nonfinite: what to do about a loss or gradient that is not finite; ``None`` to let it pass.
        loss_scale: for float16, or ``None``.
        tell: called on every rank with a message for the user; shows it once.
    """

    def __init__(
        self,
        gradients: ModelGradients,
        device: torch.device,
        rank: int,
        place: str,
        nonfinite: NonFinite,
        loss_scale: LossScale | None,
        tell: Callable[[str], None],
    ) -> None:
        self._tell = tell
        self._gradients = gradients
        self._device = device
        self._rank = rank
        self._place = place
        self._nonfinite = nonfinite
        self._loss_scale = loss_scale
        self.skipped_steps = 0

    @property
    def checks(self) -> bool:
        """Whether steps have to be checked: for overflows of float16, or for values that are not finite."""
        return self._nonfinite is not None or self._loss_scale is not None

    def check(self, step: int, bad_micro_batch: int | None) -> None:
        """Check the summed gradients of a step, update the loss scale, and skip the update if need be.

        Collective over the world.

        Args:
            step: number of the step, for messages.
            bad_micro_batch: first micro-batch whose loss was not finite on this rank, or ``None``.

        Raises:
            NonFiniteError: a loss or gradient is not finite and ``nonfinite`` is ``"raise"``; with a loss scale, only
                for a loss.
        """
        buckets = self._gradients.buckets
        assert buckets is not None
        most = largest(buckets.held(), self._device)
        if bad_micro_batch is not None:
            most = torch.full_like(most, float("nan"))
        bad = agree_on_overflow(most)
        scale = self._loss_scale
        before = scale.scale if scale is not None else 1.0
        if scale is not None:
            scale.update(bad)
        if not bad:
            return
        finding = worst(RankFinding(self._rank, self._place, bad_micro_batch, buckets.first_bad()))
        if self._nonfinite == "raise" and (scale is None or finding.micro_batch is not None):
            raise NonFiniteError(
                f"{finding.describe(step)} No rank has updated its weights. Pass `nonfinite='skip'` to leave out such "
                "steps, or lower the learning rate."
            )
        self._gradients.skip_updates()
        self.skipped_steps += 1
        if scale is not None:
            self._tell(
                f"step {step}: gradients overflow at loss scale {before:g}; the update is skipped on every rank, and "
                f"the scale is now {scale.scale:g}."
            )
        else:
            self._tell(f"{finding.describe(step)} The update is skipped on every rank.")
