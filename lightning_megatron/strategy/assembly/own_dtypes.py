"""Weights whose dtype a module's own forward changes, given that dtype before gradients and optimizers are laid out.

Some routers convert themselves when they first run (``self.classifier = self.classifier.to(self.dtype)``): in one
process, weights, gradients and the optimizer's state have that dtype from then on. Buckets of gradients are laid out
before. So modules whose source converts something of their own are run on a copy, on a random row, and what has
changed its dtype there is converted in the module too.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_megatron.mesh.marks import Marks
from lightning_megatron.mesh.parts.bytecode import names_in
from lightning_megatron.mesh.parts.packages import FRAMEWORKS, comes_from
from lightning_megatron.parallelize.reading.copy import copy_of

_CONVERTS = re.compile(
    r"""^\s*(self\.(?P<name>[\w.]+)\s*=\s*self\.(?P=name)  # self.gate = self.gate.to(torch.float32)
    |self\.[\w.]+)\.(to|type|float|double|half|bfloat16)\(  # self.gate.float()
    |^\s*self\.[\w.]+\.data\s*=""",
    re.MULTILINE | re.VERBOSE,
)


_CONVERSIONS = {"to", "type", "float", "double", "half", "bfloat16", "data"}


@dataclass(frozen=True)
class OwnDtypes:
    """Kept with a module for later runs, which find it divided: the dtypes that its code converts parameters to."""

    of: dict[str, torch.dtype]


@torch.no_grad()
def convert_as_forward_does(module: nn.Module) -> None:
    """Convert the parameters of ``module``, in place, that a forward of one of its parts would convert.

    Args:
        module: whole, on the meta device or not, or as an earlier run has left it.
    """
    own = Marks.of(module).get(OwnDtypes) or Marks.of(module).put(OwnDtypes(_found(module)))
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, dtype in own.of.items():
        if name in parameters:  # else another stage has it
            parameters[name].data = parameters[name].data.to(dtype)


def _found(module: nn.Module) -> dict[str, torch.dtype]:
    found: dict[str, torch.dtype] = {}
    for name, part in module.named_modules():
        own = any(_may_convert(base) for base in type(part).__mro__)
        if own and not isinstance(part, pl.LightningModule) and next(part.parameters(), None) is not None:
            found |= {f"{name}.{leaf}" if name else leaf: dtype for leaf, dtype in _converted(part)}
    return found


@functools.cache
def _may_convert(cls: type) -> bool:
    """Whether the source of a class, other than torch's and Lightning's, converts something of its own."""
    if comes_from(cls, *FRAMEWORKS, "builtins"):
        return False
    functions = [each for name, each in vars(cls).items() if inspect.isfunction(each) and not name.startswith("__")]
    return any(_names_a_conversion(function) and _CONVERTS.search(_source(function)) for function in functions)


def _names_a_conversion(function: Any) -> bool:
    """Whether it is worth reading the source, which takes far longer than the names that a function's code uses."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is None or not _CONVERSIONS.isdisjoint(names_in(code))


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except OSError:  # it is not at hand
        return ""


def _converted(part: nn.Module) -> Iterator[tuple[str, torch.dtype]]:
    """Parameters that have another dtype after a forward of a copy, and that dtype."""
    before = {leaf: parameter.dtype for leaf, parameter in part.named_parameters()}
    copied = copy_of(part)
    first = next(copied.parameters())
    with torch.random.fork_rng([] if first.device.type in ("cpu", "meta") else None):
        for width in dict.fromkeys(p.shape[-1] for p in copied.parameters() if p.dim()):
            try:
                copied(torch.randn(1, 2, width, device=first.device, dtype=first.dtype))
                break
            except Exception:  # it takes something else; what has been converted until then counts
                continue
    for leaf, parameter in copied.named_parameters():
        if leaf in before and parameter.dtype != before[leaf]:
            yield leaf, parameter.dtype
