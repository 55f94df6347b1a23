"""The values of ``expert_balance``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_megatron.experts.balance.added import AddedBalance

ExpertBalance = str | Mapping[str, Any] | None

_KINDS = "None, 'replica', 'bias' or {'bias': rate}, 'loss' or {'loss': factor, 'scope': 'batch' or 'sequence'}"
RATE = 0.001
"""Length of a step of biases, where none is given."""


@dataclass(frozen=True)
class Balance:
    """How experts are balanced.

    Attributes:
        per_replica: whether losses and capacities of a whole batch are meant to be each replica's.
        rate: length of a step of biases; ``None`` where they are not moved.
        added: the loss that is added to that of steps; ``None`` for none.
    """

    per_replica: bool = False
    rate: float | None = None
    added: AddedBalance | None = None

    @classmethod
    def asked(cls, value: ExpertBalance) -> Balance:
        """Meaning of a value of the option.

        Raises:
            ValueError: the value is unknown.
        """
        given = {value: None} if isinstance(value, str) else value
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise ValueError(_unknown(value))
        if set(given) == {"replica"} and given["replica"] is None:
            return cls(per_replica=True)
        if set(given) == {"bias"} and _is_factor(rate := given["bias"]):
            return cls(rate=RATE if rate is None else float(rate))
        scope = given.get("scope", "batch")
        if set(given) | {"scope"} == {"loss", "scope"} and _is_factor(given["loss"]) and scope in ("batch", "sequence"):
            return cls(added=AddedBalance(given["loss"], scope))
        raise ValueError(_unknown(value))


def _is_factor(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value >= 0)


def _unknown(value: Any) -> str:
    return f"`expert_balance={value!r}` must be {_KINDS}."
