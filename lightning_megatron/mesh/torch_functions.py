"""Functions of torch as ``__torch_function__`` is given them: by attribute, by name, and whether they write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def getters(*names: str) -> list[Any]:
    """What ``__torch_function__`` is given where these attributes are read."""
    return [getattr(Tensor, name).__get__ for name in names]


def setters(*names: str) -> list[Any]:
    """The same where these attributes are written."""
    return [getattr(Tensor, name).__set__ for name in names]


def is_in_place(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of torch changes its first argument, by its name or an option of this call."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _AUGMENTED or kwargs.get("inplace") is True


def name_of(func: Any) -> str:
    """What a function is called, or the attribute that it reads or writes."""
    name = getattr(func, "__name__", str(func))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name in ("__get__", "__set__") else name


_AUGMENTED = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__", "__imod__"}
_AUGMENTED |= {"__setitem__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}
