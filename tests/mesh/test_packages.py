"""Packages that code comes from, as told by the Python module that defined it."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import types
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn

from lightning_megatron.layers import ColumnParallelLinear
from lightning_megatron.mesh.parts.packages import (
    FRAMEWORKS,
    PACKAGE,
    comes_from,
    is_library,
    is_users,
    module_of,
    package_of,
)


class Own(nn.Linear):
    def method(self) -> None: ...

    @torch.no_grad()
    def wrapped(self) -> None: ...


@pytest.mark.parametrize(
    ("thing", "module"),
    [
        (nn.Linear, "torch.nn.modules.linear"),
        (nn.Linear(1, 1), "torch.nn.modules.linear"),
        (nn.functional, "torch.nn.functional"),
        (pl.LightningModule.log, "lightning.pytorch.core.module"),
        (ColumnParallelLinear.forward, ColumnParallelLinear.__module__),
        (math, "math"),
        (dict, "builtins"),
        (Own, __name__),
        (Own(1, 1).method, __name__),
        (Own.wrapped, __name__),
        (globals(), __name__),
        (sys._getframe(), __name__),
        (functools.partial(Own, 1), "functools"),
        (torch.Tensor.add, ""),
        (types.FunctionType(compile("0", "", "eval"), {}), ""),
    ],
)
def test_where_something_was_defined_is_told(thing: Any, module: str) -> None:
    assert module_of(thing) == module
    assert package_of(thing) == module.partition(".")[0]


def test_wrappers_are_told_by_their_globals() -> None:
    assert package_of(Own.wrapped.__globals__) == "torch" and package_of(Own.wrapped) == "tests"


def test_a_name_means_itself_and_what_lies_inside() -> None:
    assert comes_from(nn.Linear, "torch") and comes_from(nn.Linear, "numpy", "torch.nn.modules")
    assert comes_from(nn.Linear, "torch.nn.modules.linear")
    assert not comes_from(nn.Linear, "torch.nn.mod") and not comes_from(nn.Linear, "linear")
    assert not comes_from(nn.Linear) and not comes_from(torch.Tensor.add, "torch")


@pytest.mark.parametrize(
    ("thing", "users", "library"),
    [
        (Own, True, False),
        (Own(1, 1).method, True, False),
        (torch.Tensor.add, True, False),
        (nn.Linear, False, True),
        (pl.Callback, False, True),
        (ColumnParallelLinear, False, True),
        (contextlib.suppress, True, True),
        (np.ndarray, True, True),
        (sys.modules["__main__"], True, False),
    ],
)
def test_the_users_code_is_told_from_that_of_libraries(thing: Any, users: bool, library: bool) -> None:
    assert is_users(thing) == users and is_library(thing) == library


def test_further_libraries_are_named_by_those_who_ask() -> None:
    assert is_users(dict) and not is_users(dict, "builtins", "numpy")
    assert comes_from(nn.Linear, *FRAMEWORKS) and not comes_from(ColumnParallelLinear, *FRAMEWORKS)
    assert comes_from(ColumnParallelLinear, PACKAGE)
