"""Lazy imports: names of this package on first use, and optional packages."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Mapping
from typing import Any

_OFFERED: dict[str, str] = {}


def names_of(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the module-level ``__getattr__`` of a package that imports its names on first use.

    Args:
        package: its dotted name.
        homes: name -> module, relative to the package, that defines it, or that it is, where both have the same name.
    """

    def find(name: str) -> Any:
        if name in homes:
            home = importlib.import_module(f"{package}.{homes[name]}")
            return home if homes[name].endswith(f".{name}") else getattr(home, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find


def offer(name: str, home: str) -> None:
    """Register the module that defines ``name``, for code on lower floors, which imports it by :func:`offered`.

    Args:
        name: the name.
        home: dotted name of the module.
    """
    _OFFERED[name] = home


def offered(name: str) -> Any:
    """Import and return the object that was registered under ``name``.

    Raises:
        KeyError: nothing was registered under that name.
    """
    return getattr(importlib.import_module(_OFFERED[name]), name)


def figure(width: float, height: float) -> Any:
    """An empty ``matplotlib.figure.Figure`` of ``width`` × ``height`` inches, which needs no display.

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
    """Render a figure to the bytes of a file.

    Args:
        drawn: a matplotlib figure.
        kind: ``"svg"``, which keeps text as text, or ``"png"``.
    """
    import matplotlib as mpl

    buffer = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        drawn.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()
