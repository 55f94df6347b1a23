"""Calls of torch's functions, as trials look at them: which one, on what tensors, at which line of the user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.layers.whole import WholeTensor
from lightning_megatron.mesh.torch_functions import frame_of_user, line_of_frame
from lightning_megatron.strategy.activations.token_rows import ReadsOtherTokens
from lightning_megatron.strategy.loss.trials.taken_numbers import Taken

_MOST = 1 << 20  # entries that are added up


def functions_called(*names: str) -> frozenset[Any]:
    """Torch's functions and methods of these names."""
    found = (getattr(owner, name, None) for owner in (torch, Tensor, F) for name in names)
    return frozenset(function for function in found if function is not None)


def number_of(tensor: Tensor) -> float:
    """A number that is another for other entries, most likely."""
    if tensor.layout is not torch.strided:
        return 0.0
    tensor = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    try:
        return float(tensor.double().sum()) if tensor.numel() <= _MOST else float(tensor.flatten()[0])
    except ReadsOtherTokens:  # some tokens of a layer that is run on them alone
        return number_of(tensor.local()) if isinstance(tensor, WholeTensor) else 0.0


def tensors_among(values: Any) -> Iterator[Tensor]:
    """Tensors among arguments, and in their lists."""
    return (each for each in among(values) if isinstance(each, Tensor))


def among(values: Any) -> Iterator[Any]:
    """Tensors, and numbers that were taken out of them, among arguments and in their lists."""
    for value in values:
        if isinstance(value, (Tensor, Taken)):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from among(value)


def floats_among(given: Sequence[Any]) -> list[Tensor]:
    """Tensors of floats among arguments."""
    return [each for each in tensors_among(given) if each.is_floating_point()]


def number_of_floats(given: Sequence[Any]) -> float:
    """A number that is another for other floats, most likely."""
    return sum(map(number_of, floats_among(given)))


def called_at(func: Any) -> str:
    """A function's name, and the user's line that calls it."""
    return f"`{func.__name__.strip('_')}` in {line_of_frame(frame_of_user())}"
