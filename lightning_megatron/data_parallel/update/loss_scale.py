"""Dynamic loss scaling for float16: the same scale on every rank, as large as gradients allow without overflow.

Gradients below 6e-8 underflow to zero in float16. The loss is therefore multiplied by a scale before the backward, and
the summed gradients are divided by it. If gradients overflow on any rank, all ranks skip the step::

    growth_interval steps without overflow        scale × growth_factor
    hysteresis steps with overflow in a row       scale × backoff_factor

Growth and backoff are those of torch's GradScaler; hysteresis, 1 by default, is Megatron-LM's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class LossScale:
    """The scale, and the counters that decide when it grows or backs off.

    Attributes:
        scale: factor of the loss.
        growth_factor: factor of the scale after ``growth_interval`` steps without overflow.
        backoff_factor: factor of the scale after ``hysteresis`` steps with overflow in a row.
        growth_interval: in steps.
        hysteresis: in steps.
        good_steps: steps without overflow since the scale last grew or a step overflowed.
        bad_steps: steps with overflow in a row.
    """

    scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    good_steps: int = 0
    bad_steps: int = 0

    def update(self, overflowed: bool) -> None:
        """Count a step, and let the scale grow or back off.

        Args:
            overflowed: whether a gradient overflowed on any rank.
        """
        if overflowed:
            self.good_steps, self.bad_steps = 0, self.bad_steps + 1
            if self.bad_steps >= self.hysteresis:
                self.scale, self.bad_steps = self.scale * self.backoff_factor, 0
            return
        self.bad_steps, self.good_steps = 0, self.good_steps + 1
        if self.good_steps >= self.growth_interval:
            self.scale, self.good_steps = self.scale * self.growth_factor, 0

    def state_dict(self) -> dict[str, Any]:
        """All fields, as Python numbers."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved scale, also one of torch's ``GradScaler``; unknown entries are ignored."""
        renamed = {"_growth_tracker": "good_steps"}
        for key, value in state.items():
            name = renamed.get(key, key)
            if hasattr(self, name):
                setattr(self, name, type(getattr(self, name))(value))
