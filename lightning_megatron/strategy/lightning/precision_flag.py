"""``Trainer(precision="fp8-mixed")``, which Lightning would refuse before it asks the strategy.

Lightning checks the flag against a list of its own and makes the plugin itself. Two functions of the module that does
it are wrapped: one lets the flag pass, the other makes this package's plugin of it, or refuses it as ever where the
strategy is not this package's. A Lightning that lacks them refuses the flag; the plugin can be passed in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

FLAG = "fp8-mixed"
_CONVERT, _MAKE = "_convert_precision_to_unified_args", "_check_and_init_precision"


def accept_flag(connector: ModuleType) -> None:
    """Let the Trainers of Lightning's ``accelerator_connector`` take the flag."""
    owner: Any = getattr(connector, "_AcceleratorConnector", None)
    convert, make = getattr(connector, _CONVERT, None), getattr(owner, _MAKE, None)
    if convert is None or make is None or isinstance(convert, _Convert):
        return
    setattr(connector, _CONVERT, _Convert(convert))

    def made(self: Any) -> Any:
        return _eight_bits(self, convert) if self._precision_flag == FLAG else make(self)

    setattr(owner, _MAKE, made)


class _Convert:
    """Lightning's check of the flag, which lets ours pass."""

    def __init__(self, lightnings: Callable[[Any], Any]) -> None:
        self._lightnings = lightnings

    def __call__(self, precision: Any) -> Any:
        return precision if precision == FLAG else self._lightnings(precision)


def _eight_bits(connector: Any, refuse: Callable[[Any], Any]) -> Any:
    from lightning_megatron.strategy.lightning.precision import MegatronMixedPrecision
    from lightning_megatron.strategy.strategy import MegatronStrategy

    if not isinstance(connector.strategy, MegatronStrategy):
        refuse(FLAG)
    device = connector._accelerator_flag
    return MegatronMixedPrecision(FLAG, device if device in ("cpu", "mps") else "cuda")
