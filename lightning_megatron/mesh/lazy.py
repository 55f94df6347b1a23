"""Imports at the last moment: names of our own packages on first use, and packages that are optional."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Mapping
from typing import Any

_OFFERED: dict[str, str] = {}


def names_of(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package.

    Args:
        package: its name.
        homes: by name, the module of the package that it is imported from.
    """

    def find(name: str) -> Any:
        if name in homes:
            return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find


def offer(name: str, home: str) -> None:
    """Say which module has ``name``, for rooms on lower floors than it, which ask by :func:`offered`."""
    _OFFERED[name] = home


def offered(name: str) -> Any:
    """What was offered under a name, imported now."""
    return getattr(importlib.import_module(_OFFERED[name]), name)


def figure(width: float, height: float) -> Any:
    """An empty ``matplotlib.figure.Figure`` of so many inches, drawn without a display.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "pictures are drawn by matplotlib, which is not installed: `pip install 'lightning_megatron[plots]'`."
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(drawn: Any, kind: str) -> bytes:
    """A figure as a file's bytes; ``kind`` is ``"svg"``, with text as text, or ``"png"``."""
    import matplotlib as mpl

    buffer = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        drawn.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()
