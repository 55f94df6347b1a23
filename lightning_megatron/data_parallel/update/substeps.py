"""Takes one step of an optimizer in several, each on some of its parameters, so that it equals the step on all.

The first is the caller's own ``optimizer.step``, with all its hooks. Those after it run the optimizer's code alone: no
hooks, so that schedulers and the user's hooks see one step. Numbers that the optimizer keeps in its groups (a count of
steps) start each of them anew, and so change once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

Groups = Sequence[Sequence[nn.Parameter]]


class SubSteps:
    """One step of an optimizer, in several.

    Args:
        optimizer: about to step for the first time of them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._options = [
            {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
            for group in optimizer.param_groups
        ]

    def run(self, groups: Groups) -> None:
        """Step on further parameters, by group of the optimizer."""
        for group, options, parameters in zip(self._optimizer.param_groups, self._options, groups, strict=True):
            for name, value in options.items():
                if name != "params" and isinstance(value, Tensor):
                    group[name].copy_(value)
                elif name != "params":
                    group[name] = value
            group["params"] = list(parameters)
        step: Any = type(self._optimizer).step
        if getattr(step, "hooked", False):
            step = step.__wrapped__
        step(self._optimizer)
