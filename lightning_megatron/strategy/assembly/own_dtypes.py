"""Weights whose dtype a module's own forward changes, given that dtype before gradients and optimizers are laid out.

Some routers convert themselves when they first run (``self.classifier = self.classifier.to(self.dtype)``): in one
process, weights, gradients and the optimizer's state have that dtype from then on. Buckets of gradients are laid out
before. So modules whose source converts something of their own are run on a copy, on a random row, and what has
changed its dtype there is converted in the module too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import torch
from torch import nn

from lightning_megatron.parallelize.reading.copy import copy_of

_CONVERTS = re.compile(r"self\.[\w.]+\.(to|type|float|double|half|bfloat16)\(|self\.[\w.]+\.data\s*=")


@torch.no_grad()
def convert_as_forward_does(module: nn.Module) -> list[str]:
    """Convert the parameters of ``module``, in place, that a forward of one of its parts would convert.

    Args:
        module: whole; its parameters may be on the meta device.

    Returns:
        The names of those that were converted.
    """
    done: list[str] = []
    for name, part in module.named_modules():
        if _may_convert(type(part)) and any(True for _ in part.parameters()):
            for leaf, dtype in _converted(part):
                parameter = part.get_parameter(leaf)
                parameter.data = parameter.data.to(dtype)
                done.append(f"{name}.{leaf}" if name else leaf)
    return done


def _may_convert(cls: type) -> bool:
    """Whether the source of a class, other than torch's and Lightning's, converts something of its own."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "lightning", "pytorch_lightning", "builtins"):
            continue
        for function in vars(base).values():
            try:
                if inspect.isfunction(function) and _CONVERTS.search(inspect.getsource(function)):
                    return True
            except OSError:  # its source is not at hand
                continue
    return False


def _converted(part: nn.Module) -> Iterator[tuple[str, torch.dtype]]:
    """Which parameters have another dtype after a forward of a copy, and which."""
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
