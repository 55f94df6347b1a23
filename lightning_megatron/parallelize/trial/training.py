"""How a trial compares in training: by terms and gradients, within a tolerance per dtype, without dropout.

A region may be right in evaluation and wrong in training: code may normalise over the whole width in training only, or
in a custom backward. Dropout would make the runs differ, so trials disable it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest relative deviation at which the results of a trial count as equal, by dtype."""

_DROPOUTS = {
    "dropout",
    "dropout_",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "alpha_dropout_",
    "feature_dropout",
    "feature_dropout_",
    "feature_alpha_dropout",
    "feature_alpha_dropout_",
}
_ATTENTION = "scaled_dot_product_attention"
_ATTENTION_DROPOUT = 4
"""Position of ``dropout_p`` among the arguments of torch's attention."""


class NoDropout(TorchFunctionMode):
    """Makes every dropout return its input unchanged."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == _ATTENTION:
            if len(args) > _ATTENTION_DROPOUT:
                args = (*args[:_ATTENTION_DROPOUT], 0.0, *args[_ATTENTION_DROPOUT + 1 :])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def term_and_gradients(term: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """One rank's term of the row-parallel sum, and the gradients of a fixed linear combination of its entries.

    Args:
        term: [.., out].
        leaves: tensors to differentiate by.

    Returns:
        The detached term, then one gradient per leaf; zeros for leaves that the term does not depend on.
    """
    weights = torch.linspace(-1, 1, term.numel(), dtype=term.dtype, device=term.device).mul(7).sin().view_as(term)
    found = torch.autograd.grad((term * weights).sum(), list(leaves), allow_unused=True)
    gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
    return [term.detach(), *gradients]


def compare(total: Sequence[Tensor], whole: Sequence[Tensor], tolerance: float) -> float | None:
    """The largest deviation relative to a tensor's largest entry; None if it is within ten times the tolerance."""
    scale = max((float(x.abs().max()) for x in whole if x.numel()), default=0.0)
    worst = 0.0
    for got, want in zip(total, whole, strict=True):
        if want.numel():
            worst = max(worst, float((got - want).abs().max()) / max(float(want.abs().max()), 1e-3 * scale, 1e-30))
    return worst if worst > 10 * tolerance else None


Run = Callable[[int], list[Tensor]]


def reproducible(run: Run, tolerance: float) -> list[Tensor] | None:
    """The result of a run, or None if the run fails or gives another result with another seed."""
    try:
        first, second = run(1), run(2)
    except Exception:  # code that cannot be differentiated here, or takes another path in training
        return None
    if len(first) != len(second) or any(a.shape != b.shape for a, b in zip(first, second, strict=True)):
        return None
    return first if compare(second, first, tolerance) is None else None


def has_numbers(tensor: Tensor) -> bool:
    """Whether a tensor holds values; in a rehearsal large tensors have a shape only."""
    return not isinstance(tensor, FakeTensor)
