"""Watches of operators share a mode, and see what each mode by itself would see."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.mesh.torch_functions import OperatorWatch, Run

_DEPTH = torch._C._len_torch_dispatch_stack


class _Notes(OperatorWatch):
    def __init__(self, name: str, found: list[str]) -> None:
        self._name, self._found = name, found

    def seen(self, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._found.append(f"{self._name} {func.__name__}")
        return run(func, args, kwargs)


class _Doubles(OperatorWatch):
    def seen(self, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return 2 * run(func, args, kwargs)


class _Plain(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_latest_watch_sees_an_operator_first_in_one_mode() -> None:
    found: list[str] = []
    with _Notes("outer", found), _Notes("inner", found):
        assert _DEPTH() == 1
        torch.ones(2) + 1
    assert _DEPTH() == 0
    assert found == ["inner ones.default", "outer ones.default", "inner add.Tensor", "outer add.Tensor"]


def test_a_watch_may_change_what_an_operator_gives() -> None:
    found: list[str] = []
    x = torch.ones(2)
    with _Notes("outer", found), _Doubles(), _Notes("inner", found):
        assert (x + 1).tolist() == [4.0, 4.0]
    assert found[:2] == ["inner add.Tensor", "outer add.Tensor"]  # and not the product


def test_another_mode_between_two_watches_stays_between_them() -> None:
    found: list[str] = []
    x = torch.ones(2)
    with _Notes("outer", found), _Plain(), _Notes("inner", found):
        assert _DEPTH() == 3
        x.sum()
    assert (_DEPTH(), found) == (0, ["inner sum.default", "outer sum.default"])


def test_a_watch_ends_with_an_error_inside() -> None:
    found: list[str] = []
    try:
        with _Notes("outer", found), _Notes("inner", found):
            raise KeyError
    except KeyError:
        torch.ones(1)
    assert (_DEPTH(), found) == (0, [])
