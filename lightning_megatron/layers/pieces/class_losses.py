"""Losses over classes whose tokens are summed in parts: what one call asks for, and how the parts become its result.

The parts are pieces of tokens, one after the other (:mod:`.token_pieces`), or the tokens of each context rank. Either
way a mean is the sum over all parts, divided by what the whole target says, so that it is torch's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.layers.whole import NeedsWhole, WholeTensor

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


class ClassLoss:
    """One call of ``F.cross_entropy`` or ``F.nll_loss`` with class numbers as targets, classes in dim 1.

    Args:
        func: the function of torch.
        input: ``[rows, classes, ..]``.
        target: ``[rows, ..]``.
        weight: and the others: as torch takes them.

    Attributes:
        target: ``[rows, ..]``, of all tokens.
        is_per_token: whether the result has a loss per token, rather than one for all.

    Raises:
        NeedsWhole: another form of call, which torch has to answer on whole tensors: deprecated arguments,
            probabilities as targets, shapes that do not fit.
    """

    def __init__(
        self,
        func: Any,
        input: Any,
        target: Any,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        if size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none"):
            raise NeedsWhole
        if input.ndim < 2 or target.is_floating_point() or target.shape != input.shape[:1] + input.shape[2:]:
            raise NeedsWhole  # probabilities; or torch says what is wrong with that
        self.target: Tensor = target.full() if isinstance(target, WholeTensor) else target
        self.is_per_token = reduction == "none"
        self._func, self._is_mean = func, reduction == "mean"
        self._dtype: torch.dtype = input.dtype
        self._options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index}
        if func is F.cross_entropy:
            self._options["label_smoothing"] = label_smoothing

    def of_part(self, logits: Tensor, target: Tensor) -> Tensor:
        """Loss per token of some tokens, or their sum; a sum of 16-bit logits in float32.

        Args:
            logits: ``[rows, classes, ..]``.
            target: ``[rows, ..]``.
        """
        if self.is_per_token:
            return self._func(logits, target, reduction="none", **self._options)  # type: ignore[no-any-return]
        logits = logits.float() if logits.dtype in _SIXTEEN_BIT else logits
        return self._func(logits, target, reduction="sum", **self._options)  # type: ignore[no-any-return]

    def of_all(self, total: Tensor) -> Tensor:
        """The loss that torch returns, from the sum over the parts of all ranks; in its dtype, also under autocast."""
        if self._is_mean:
            total = total / self._mean_weight()
        return total if torch.is_autocast_enabled(total.device.type) else total.to(self._dtype)

    def _mean_weight(self) -> Tensor:
        """Divisor of a mean over targets: their number, or the sum of their classes' weights."""
        weight, kept = self._options["weight"], torch.ne(self.target, self._options["ignore_index"])
        if weight is None:
            return kept.sum()
        summed: Tensor = weight[self.target.where(kept, 0)].where(kept, 0).sum()
        return summed
