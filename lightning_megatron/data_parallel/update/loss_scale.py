"""A loss scale for float16: the largest that does not overflow, found by trying, the same on every rank.

Gradients below 6e-8 vanish in float16. The loss is therefore multiplied by a scale before the backward, and the summed
gradients are divided by it. Steps with an overflow anywhere are skipped everywhere::

    growth_interval steps without overflow        scale × growth_factor
    hysteresis steps with overflow in a row       scale × backoff_factor

Growth and backoff are those of torch's GradScaler; hysteresis, 1 by default, is Megatron-LM's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class LossScale:
    """The scale and what led to it."""

    scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    good_steps: int = 0
    bad_steps: int = 0

    def update(self, overflowed: bool) -> None:
        """Follow a step: grow after many good ones, back off after bad ones."""
        if overflowed:
            self.good_steps, self.bad_steps = 0, self.bad_steps + 1
            if self.bad_steps >= self.hysteresis:
                self.scale, self.bad_steps = self.scale * self.backoff_factor, 0
            return
        self.bad_steps, self.good_steps = 0, self.good_steps + 1
        if self.good_steps >= self.growth_interval:
            self.scale, self.good_steps = self.scale * self.growth_factor, 0

    def state_dict(self) -> dict[str, Any]:
        """All of it, as numbers."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved scale; entries this class does not have are left out (torch's GradScaler names two
        things otherwise).
        """
        renamed = {"_growth_tracker": "good_steps"}
        for key, value in state.items():
            name = renamed.get(key, key)
            if hasattr(self, name):
                setattr(self, name, type(getattr(self, name))(value))
