"""Numbers that a step takes out of tensors, in trials: it may decide by them, in Python, what its loss is.

::

    if loss.item() > 3:                     a decision by a number of the batch
    loss = each.sum() / keep.sum().item()   a count by which the loss is divided
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self


class Taken:
    """A number that a step has taken out of a tensor; what is computed of it is followed as well."""

    _heard: Callable[[Taken, Any, str, bool], None] | None = None
    asked: Any = None
    graded = False
    followed = False

    def by(
        self,
        heard: Callable[[Taken, Any, str, bool], None] | None,
        asked: Any,
        *,
        graded: bool = False,
        followed: bool = False,
    ) -> Self:
        """Say what it is.

        Args:
            heard: is told of its comparisons, and of what each gives.
            asked: what was computed of the result of a comparison, and led to it; ``None`` for nothing.
            graded: whether it is one of the batch, whatever it is.
            followed: whether it is computed of integers of the batch.
        """
        self._heard, self.asked, self.graded, self.followed = heard, asked, graded, followed
        return self

    @property
    def as_float(self) -> float:
        """The number alone."""
        return float(self)  # type: ignore[arg-type]

    def compared(self, other: Any, name: str, found: bool) -> None:
        """Say that it is compared; called by the comparison."""
        if self._heard is not None:
            self._heard(self, other, name, found)

    def computed(self, found: Any, other: Any) -> Any:
        """Follow what is computed of it and of another number."""
        asked, graded, followed = self.asked, self.graded, self.followed
        if isinstance(other, Taken):
            asked, graded, followed = asked or other.asked, graded or other.graded, followed or other.followed
        kind = TakenFloat if isinstance(found, float) else TakenInt if isinstance(found, int) else None
        return found if kind is None else kind(found).by(self._heard, asked, graded=graded, followed=followed)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(2)[1][0]


class TakenFloat(Taken, float):
    """See :class:`Taken`."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return float, (float(self),)


class TakenInt(Taken, int):
    """See :class:`Taken`."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return int, (int(self),)


def _computing(kind: type, name: str) -> Callable[..., Any]:
    original = getattr(kind, name)

    @functools.wraps(original)
    def method(self: Any, *others: Any) -> Any:
        found = original(self, *others)
        return found if found is NotImplemented else self.computed(found, others[0] if others else None)

    return method


def _comparing(kind: type, name: str) -> Callable[..., Any]:
    original = getattr(kind, name)

    @functools.wraps(original)
    def method(self: Any, other: Any) -> Any:
        found = original(self, other)
        if found is not NotImplemented:
            self.compared(other, name.strip("_"), found)
        return found

    return method


for _kind, _plain in ((TakenFloat, float), (TakenInt, int)):
    for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "neg", "abs"):
        setattr(_kind, f"__{_name}__", _computing(_plain, f"__{_name}__"))
    for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(_kind, f"__{_name}__", _comparing(_plain, f"__{_name}__"))
