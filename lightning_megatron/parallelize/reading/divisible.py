"""Modules that compute what a linear layer does from other tensors than a weight, and how each of these is cut.

A quantised weight is codes and scales (``y = (scale * codes) x + b``); IA3 (Liu et al., arXiv 2205.05638) scales the
features that a linear layer gives, or those that it is given; DoRA divides them by norms (see `reading.column_norms`).
Such a module can be split like a linear layer if the features of its output, or of its input, go with indices of one
dim of some of its tensors::

                      codes [bits, out, in]   scale [out]   bias [out]
    split by output   dim 1                   dim 0         dim 0
    split by input    dim 2                   whole         whole

The dims are found by trying: the second half of the indices of a dim is changed in a copy, and belongs to the output's
features if only the second half of these changes, or to the input's if the change shows for the second half of the
input only. Both splits are then tried as a whole: slices of the module must compute slices of its output, and terms of
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_megatron.mesh.parts.boxes import Range
from lightning_megatron.mesh.parts.names import called
from lightning_megatron.parallelize.reading.column_norms import holding, noting, parts_with_norms
from lightning_megatron.parallelize.reading.copy import copy_of
from lightning_megatron.parallelize.reading.kinds import is_attention, is_linear, is_table, linear_sizes
from lightning_megatron.parallelize.reading.replay import Prepare, Replay

_MOST = 12
"""Tensors of a module that computes one product; larger modules are not tried."""
_SIZES = {True: ("in_features", "nx"), False: ("out_features", "nf")}
"""Attributes with the number of input features, and of output features."""
_NEAR = {torch.float64: 1e-8, torch.float32: 1e-4}


@dataclass(frozen=True)
class Divisible:
    """How the tensors of such a module are cut.

    Attributes:
        sizes: input and output features.
        by_output: name of a parameter or buffer -> its dim with the features of the output; others stay whole.
        by_input: likewise for the features of the input.
        adds: whether it gives something else than zeros for zeros, such as a bias.
    """

    sizes: tuple[int, int]
    by_output: Mapping[str, int]
    by_input: Mapping[str, int]
    adds: bool

    def dims(self, by_input: bool) -> Mapping[str, int]:
        """Name of a tensor -> the dim that is cut."""
        return self.by_input if by_input else self.by_output

    def ranges(self, size: int, features: Sequence[Range], by_input: bool) -> list[Range]:
        """Ranges of features as ranges of a dim of ``size`` indices, of which one may hold several features.

        Raises:
            ValueError: a range ends inside of an index.
        """
        whole = self.sizes[0 if by_input else 1]
        if any(bound * size % whole for pair in features for bound in pair):
            raise ValueError(
                f"A module has a tensor with {size} entries for {whole} features (codes, or scales of groups), and a "
                f"rank's part of the features would end inside of an entry; use a `tensor_parallel_size` that divides "
                f"{size}."
            )
        return [(start * size // whole, stop * size // whole) for start, stop in features]


_found: WeakKeyDictionary[nn.Module, tuple[Any, Divisible | None]] = WeakKeyDictionary()
"""What was found, for the tensors that the module had then: an adapter may be added to it."""


def divisible(module: nn.Module) -> Divisible | None:
    """How the module can be cut like a linear layer, found by trials on copies; ``None`` for others, and linear layers.

    Args:
        module: any module; it does not change. One with tensors on the meta device cannot be tried.
    """
    if not _may_be(module):
        return None
    tensors = [(name, x.shape, x.dtype) for name, x in tensors_of(module).items()]
    known = _found.get(module)
    if known is None or known[0] != tensors:
        known = _found[module] = tensors, _study(module)
    return known[1]


def keep_features(module: nn.Module, cut: Divisible, features: Sequence[Range], by_input: bool) -> None:
    """Reduce a copy of such a module to ranges of its input or output features, in place."""
    for name, dim in cut.dims(by_input).items():
        tensor = tensor_of(module, name)
        parts = [tensor.data.narrow(dim, a, b - a) for a, b in cut.ranges(tensor.shape[dim], features, by_input)]
        tensor.data = torch.cat(parts, dim)
    set_sizes(module, cut, sum(stop - start for start, stop in features), by_input)


def set_sizes(module: nn.Module, cut: Divisible, size: int, by_input: bool) -> None:
    """Set what the module, and parts of it, say of the number of their input or output features."""
    for part in module.modules():
        for attribute in _SIZES[by_input]:
            if vars(part).get(attribute) == cut.sizes[0 if by_input else 1]:
                setattr(part, attribute, size)


def tensor_of(module: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of this name."""
    found = called(module, name)
    assert isinstance(found, Tensor)
    return found


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _study(module: nn.Module) -> Divisible | None:
    for sizes in dict.fromkeys(_guesses(module)):
        bench = _Bench(module, sizes)
        if bench.works and (found := bench.cut()) is not None:
            return found
    return None


def _may_be(module: nn.Module) -> bool:
    """Whether the module has tensors of its own beside those of at most one linear layer, and can be tried."""
    if is_linear(module) or is_table(module) or is_attention(module) or hasattr(module, "training_step"):
        return False
    tensors = dict(islice(chain(module.named_parameters(), module.named_buffers()), _MOST + 1))
    if not 1 <= len(tensors) <= _MOST or any(
        x.is_meta or type(x) not in (Tensor, nn.Parameter) for x in tensors.values()
    ):
        return False
    if not any(x.is_floating_point() for x in tensors.values()):
        return False
    linears = [part for part in module.modules() if is_linear(part)]
    own = set(map(id, tensors.values())) - {id(p) for part in linears for p in part.parameters()}
    if len(linears) > 1 and not any(parts_with_norms(module)):
        return False
    return bool(own) and len({id(x) for x in tensors.values()}) == len(tensors)


def _guesses(module: nn.Module) -> Iterator[tuple[int, int]]:
    """Input and output features as a linear layer inside says, or attributes, or the shape of the largest tensor."""
    inner = [linear_sizes(part) for part in module.modules() if is_linear(part)]
    if inner:
        yield max(inner, key=math.prod)
        return
    named = [next((n for a in _SIZES[way] if isinstance(n := vars(module).get(a), int)), 0) for way in (True, False)]
    if all(named):
        yield named[0], named[1]
    matrices = [x for x in tensors_of(module).values() if x.dim() > 1]
    if matrices:
        *_, rows, columns = max(matrices, key=torch.numel).shape
        yield columns, rows
        yield rows, columns


class _Bench:
    """Runs a copy of a module, with random numbers for its weights, on a tiny input.

    Args:
        module: the module.
        sizes: its input and output features.

    Attributes:
        works: whether it gives as many features, twice the same, for an input of as many.
    """

    def __init__(self, module: nn.Module, sizes: tuple[int, int]) -> None:
        self._sizes = sizes
        copied = copy_of(module)
        generator = torch.Generator().manual_seed(8)
        for x in filter(torch.is_floating_point, tensors_of(copied).values()):
            x.data = torch.randn(x.shape, generator=generator).to(x.device, x.dtype)
        self._replay = Replay(copied, (), {})
        first = next(x for x in tensors_of(copied).values() if x.is_floating_point())
        self._near = _NEAR.get(first.dtype, 3e-2)
        x = torch.linspace(-1, 1, 6 * sizes[0], dtype=torch.float64).mul(5).sin().view(2, 3, sizes[0])
        self._x = x.to(first.device, first.dtype)
        self._norms: dict[str, Tensor] = {}
        self._whole = self._run(self._x, noting(self._norms))
        drops = _without_dropout if any(parts_with_norms(copied)) else None  # theirs is on the input
        again = None if self._whole is None else self._run(self._x, drops, training=True)  # dropout makes it another
        self.works = self._whole is not None and min(sizes) > 1 and self._same(again, self._whole)

    def cut(self) -> Divisible | None:
        """How its tensors are cut; ``None`` if the slices do not compute what the whole does."""
        features: tuple[dict[str, int], dict[str, int]] = {}, {}
        for name, x in tensors_of(self._replay.part).items():
            for dim, size in enumerate(x.shape):
                if size > 1 and size % 2 == 0:
                    for way, found in enumerate(self._depends(name, dim)):
                        if found:
                            features[way].setdefault(name, dim)
        zeros = self._run(torch.zeros_like(self._x))
        if not all(features) or zeros is None:
            return None
        cut = Divisible(self._sizes, features[0], features[1], bool(zeros.abs().max() > 0))
        return cut if self._adds_up(cut, zeros) else None

    def _depends(self, name: str, dim: int) -> tuple[bool, bool]:
        """Whether the indices of a dim go with the features of the output, and with those of the input."""
        change = _both(_changing(name, dim), holding(self._norms))
        changed = self._run(self._x, change)
        if changed is None or self._whole is None:
            return False, False
        where = (changed - self._whole).abs().amax((0, 1)) > 0
        if not where.any():
            return False, False
        same = [self._same(self._run(x, change), before) for x, before in self._of_halves]
        return not bool(where[: self._sizes[1] // 2].any()), same == [True, False]

    @cached_property
    def _of_halves(self) -> list[tuple[Tensor, Tensor | None]]:
        """The input with one half of its features only, and what comes of it before any change."""
        first, second = self._x.clone(), self._x.clone()
        middle = self._sizes[0] // 2
        first[..., middle:], second[..., :middle] = 0, 0
        return [(x, self._run(x, holding(self._norms))) for x in (first, second)]

    def _adds_up(self, cut: Divisible, zeros: Tensor) -> bool:
        """Whether halves by output are halves of the output, and halves by input add up to it."""
        (wide, out), x = self._sizes, self._x
        if wide % 2 or out % 2:
            return False
        halves = [(0, n // 2) for n in (wide, out)], [(n // 2, n) for n in (wide, out)]
        rows = [self._run(x, _keeping(cut, half[1], False)) for half in halves]
        hold = holding(self._norms)
        terms = [self._run(x[..., slice(*half[0])], _both(_keeping(cut, half[0], True), hold)) for half in halves]
        if any(part is None for part in (*rows, *terms)):
            return False
        together = torch.cat([y for y in rows if y is not None], -1)
        total = torch.stack([y for y in terms if y is not None]).sum(0) - zeros
        return self._same(together, self._whole) and self._same(total, self._whole)

    def _run(self, x: Tensor, prepare: Prepare | None = None, training: bool = False) -> Tensor | None:
        try:
            with torch.no_grad():
                output = self._replay.run(prepare, args=(x,), training=training)[1]
        except Exception:  # the module may take other arguments, or other sizes
            return None
        fits = type(output) is Tensor and output.is_floating_point() and output.shape[:-1] == x.shape[:-1]
        return output if fits and output.isfinite().all() else None

    def _same(self, got: Tensor | None, want: Tensor | None) -> bool:
        if got is None or want is None or got.shape != want.shape or want.shape[-1] != self._sizes[1]:
            return False
        return bool((got - want).abs().max() <= self._near * want.abs().max())


def _changing(name: str, dim: int) -> Prepare:
    """Changes the second half of the indices of a dim: other numbers for weights, another order for codes."""

    def change(copied: nn.Module) -> None:
        tensor = tensor_of(copied, name)
        values = tensor.data.clone()
        half = values.narrow(dim, values.shape[dim] // 2, values.shape[dim] // 2)
        if values.is_floating_point():
            noise = torch.randn(half.shape, generator=torch.Generator().manual_seed(9))
            half.add_(noise.to(half.device, half.dtype))
        else:
            half.copy_(half.flip(dim) if bool((half.flip(dim) != half).any()) else half.roll(1))
        tensor.data = values

    return change


def _without_dropout(copied: nn.Module) -> None:
    for part in copied.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0


def _both(first: Prepare, second: Prepare) -> Prepare:
    def prepare(copied: nn.Module) -> None:
        first(copied)
        second(copied)

    return prepare


def _keeping(cut: Divisible, half: Range, by_input: bool) -> Prepare:
    return lambda module: keep_features(module, cut, [half], by_input)
