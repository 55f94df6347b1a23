"""Lets code between an attention's projections view their outputs by the sizes of the model.

A layer that computes its attention itself reads its sizes from what is whole in it, and views by them what is split::

    batch, length, hidden = x.shape                          hidden of the model
    q = self.query(x).view(batch, length, heads, -1)         heads -> heads / t
    ...
    x = x + self.out(y.reshape(batch, length, hidden))       hidden -> hidden / t

So the outputs of the projections are tensors of a class of their own, which passes on to all that is computed from
them, up to the last projection. A function with sizes among its arguments (`view`, `reshape`, `expand`, `split`) that
is given one gets some of these sizes divided, or multiplied, by ``t``. Which ones is learned from two runs of a trial:
one of the whole module, whose shapes say what each call makes, and one with the slices of a rank, whose shapes say
which dim is split. It is kept by the line of code that calls, as a size may be that of another dim by chance::

    whole    [2, 11, 32].view(2, 11, 4, -1) -> [2, 11, 4, 8]
    a rank   [2, 11, 16].view(2, 11, 4, -1), so dim 2 is split: the size at place 2 is divided
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_megatron.layers.whole import WholeTensor
from lightning_megatron.mesh.parts.packages import PACKAGE, package_of
from lightning_megatron.mesh.pickling import OfOneRank

Site = tuple[tuple[CodeType, int], ...]
"""The call of a function: code and instruction, those of the callers included where a library calls it."""

T = Tensor
_VIEWS: frozenset[Any] = frozenset((T.view, T.reshape, torch.reshape, T.unflatten, torch.unflatten))
_SPLITS: frozenset[Any] = frozenset((T.split, torch.split, T.split_with_sizes, torch.split_with_sizes))
_EXPANDS: frozenset[Any] = frozenset((T.expand, torch.broadcast_to, T.broadcast_to))
_SIZED = _VIEWS | _SPLITS | _EXPANDS
VIEWS = frozenset(func.__name__ for func in _SIZED)
"""Names of the functions with sizes."""
_BETWEEN = frozenset(("torch", PACKAGE))
"""Packages whose modes may stand between the user's code and the function, in some runs and not in others."""
_CALLED_FROM_MANY = frozenset(("einops",))


class OtherViews(Exception):
    """Code views split tensors in a way that cannot be followed."""


class _Sized(Tensor):
    """An ordinary tensor, computed from the outputs of split projections, with sizes of one rank.

    Attributes:
        views: how functions with sizes are called.
    """

    views: ClassVar[SplitViews]

    @classmethod
    @torch.compiler.disable  # which does not follow who calls
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SIZED and not any(isinstance(value, torch.dtype) for value in args):
            args, kwargs = cls.views.translated(func, args, kwargs or {}, _site(sys._getframe(1)))
        return super().__torch_function__(func, types, args, kwargs)


class SplitViews(OfOneRank):
    """How code between projections calls functions with sizes.

    Args:
        parts: size of the tensor group.
        packed: number of parts that a projection packs, which is no dim to be split.
        inner: whether the inner one of two dims is split where a dim that is not the last one is viewed as two, as are
            heads in [batch * heads, ..]; of features it is the outer one, heads in [.., heads * d].
    """

    def __init__(self, parts: int, packed: int = 1, inner: bool = False) -> None:
        self._parts, self._packed, self._inner = parts, packed, inner
        self._kind: Any = type("SplitTensor", (_Sized,), {"views": self})
        self._factors: dict[Site, tuple[bool | None, ...]] = {}  # of each size: divided, multiplied or as it is
        self._calls: list[tuple[Site, Any, torch.Size, Any]] = []
        self._next: int | None = None
        self._records = False

    def install(self, columns: Iterable[nn.Module], row: nn.Module) -> None:
        """Add hooks to projections, whose outputs are split, and to the last one, whose input is an ordinary tensor."""
        for column in columns:
            column.register_forward_hook(_Shown(self))
        row.register_forward_pre_hook(_Plain(self), with_kwargs=True)

    def learn(self, whole: Callable[[], Any], rank: Callable[[], Any]) -> None:
        """Learn from two runs with the hooks installed; several such pairs may be given one after another.

        Args:
            whole: runs the unsplit module.
            rank: runs it with the slices of one rank.

        Raises:
            OtherViews: the code cannot be followed.
            Exception: any exception of the user's code.
        """
        self._calls, self._records = [], True
        try:
            whole()
            self._records, self._next = False, 0
            rank()
            if self._next != len(self._calls):
                raise OtherViews  # it takes another path with the sizes of one rank
        finally:
            self._calls, self._records, self._next = [], False, None

    @property
    def codes(self) -> set[CodeType]:
        """Code whose calls were learned."""
        return {code for site in self._factors for code, _ in site}

    def show(self, output: Tensor) -> Tensor:
        """The output of a projection: [.., features / t].

        Raises:
            RuntimeError: it is a tensor of some of the tokens, which takes no sizes of one rank.
        """
        if isinstance(output, WholeTensor):
            raise RuntimeError(
                "a layer that computes its attention itself was split by its views, which cannot be followed where its "
                "tokens are split as well, by `context_parallel_size` or `activation_offload={'tokens': share}`. Build "
                "the module anew for a run with these, or leave its projections out of `tensor_parallel_plan`."
            )
        return output.as_subclass(self._kind)

    def plain(self, value: Any) -> Any:
        """The same as an ordinary tensor, if it is one of these."""
        return value.as_subclass(Tensor) if isinstance(value, self._kind) else value

    def translated(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> tuple[Any, Any]:
        """Arguments of a function with sizes, with those of one rank.

        Raises:
            RuntimeError: no run that was tried has made this call.
        """
        model, rest = args[0] if args else kwargs["input"], args[1:]
        leaves, form = tree_flatten((rest, kwargs), is_leaf=lambda value: value is model)
        plain = [tuple(leaf) if isinstance(leaf, torch.Size) else leaf for leaf in leaves]
        sizes, inner = tree_flatten(plain, is_leaf=lambda value: value is model)
        if self._records:
            self._calls.append((site, sizes, model.shape, _shapes(self.plain_call(func, args, kwargs))))
            return args, kwargs
        if self._next is not None:
            factors = self._learned(func, model, sizes, site, self._next)
            self._next += 1
            if self._factors.setdefault(site, factors) != factors:
                raise OtherViews  # the same line runs for tensors that are split in other ways
        factors = self._factors.get(site, ()) if site in self._factors else _refuse(site, func)
        if any(factor is not None for factor in factors):
            sizes = [self._with(size, factor, site) for size, factor in zip(sizes, factors, strict=True)]
            rest, kwargs = tree_unflatten(tree_unflatten(sizes, inner), form)
        return ((model, *rest) if args else rest), kwargs

    def plain_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function, of which only the shapes are looked at."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return func(*args, **kwargs)

    def _with(self, size: Any, factor: bool | None, site: Site) -> Any:
        if factor is None:
            return size
        if not factor:
            return size * self._parts
        if size % self._parts:
            raise ValueError(
                f"{_line(site)}: a size of {size} is that of features split over {self._parts} tensor-parallel ranks, "
                "by which it is not divisible."
            )
        return size // self._parts

    def _learned(self, func: Any, model: Tensor, sizes: list[Any], site: Site, number: int) -> tuple[bool | None, ...]:
        """The sizes to divide in a call of the run of one rank, in view of the same call of the whole run."""
        if number == len(self._calls):
            raise OtherViews  # it takes another path with the sizes of one rank
        known, given, shape, results = self._calls[number]
        pairs = zip(shape, model.shape, strict=False)
        split = [dim for dim, (of_all, own) in enumerate(pairs) if of_all == own * self._parts and own]
        same = [of_all == own for of_all, own in zip(shape, model.shape, strict=False)]
        if known != site or len(shape) != model.ndim or len(sizes) != len(given) or len(split) > 1:
            raise OtherViews  # it takes another path with the sizes of one rank
        if all(same):
            return (None,) * len(sizes)
        if len(split) + sum(same) != len(shape):
            raise OtherViews  # not along one dim
        if func in _SPLITS:
            return self._of_split(split[0], model.ndim, sizes, given)
        if func in _EXPANDS:
            return self._of_view(results[0], len(results[0]) - len(shape) + split[0], sizes)
        return self._of_view(results[0], self._dim_of(shape, split[0], results[0]), sizes)

    def _of_split(self, dim: int, ndim: int, sizes: list[Any], given: list[Any]) -> tuple[bool | None, ...]:
        """Of `split`: the sizes of the pieces, if it is the dim that is split; the dim comes last."""
        named = [value for value in sizes if type(value) is int]
        along = named[-1] if len(named) > 1 else 0
        if along % ndim != dim:
            return (None,) * len(sizes)
        last = len(sizes) - 1
        return tuple(
            True if place < last and size == whole else None
            for place, (size, whole) in enumerate(zip(sizes, given, strict=True))
        )

    def _of_view(self, result: Sequence[int], dim: int, sizes: list[Any]) -> tuple[bool | None, ...]:
        """Of a function whose last sizes are those of its result, of which one is split."""
        wanted = [size // self._parts if place == dim else size for place, size in enumerate(result)]
        numbers = [place for place, size in enumerate(sizes) if type(size) is int]
        factors: list[bool | None] = [None] * len(sizes)
        for place, size in zip(reversed(numbers), reversed(wanted), strict=False):
            own = sizes[place]
            if own in (size, -1):
                continue
            if own not in (size * self._parts, size / self._parts):
                raise OtherViews
            factors[place] = bool(own > size)
        return tuple(factors)

    def _dim_of(self, shape: Sequence[int], split: int, result: Sequence[int]) -> int:
        """The dim of a view that is split, where dim ``split`` of the viewed tensor is."""
        start, inside, found = math.prod(shape[:split]), math.prod(shape[: split + 1]), []
        for dim, size in enumerate(result):
            before = math.prod(result[:dim])
            reaches = before <= start < before * size or start <= before < inside
            if reaches and size % self._parts == 0 and not (size == self._packed > 1):
                found.append(dim)
        if not found:
            raise OtherViews
        return found[-1 if self._inner and split < len(shape) - 1 else 0]


class _Shown(OfOneRank):
    def __init__(self, views: SplitViews) -> None:
        self._views = views

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return self._views.show(output)


class _Plain(_Shown):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:  # type: ignore[override]
        plain = self._views.plain
        return tuple(map(plain, args)), {key: plain(value) for key, value in kwargs.items()}


def _shapes(results: Any) -> list[torch.Size]:
    return [value.shape for value in tree_leaves(results) if isinstance(value, Tensor)]


def _site(frame: FrameType | None) -> Site:
    site = []
    while frame is not None:
        package = package_of(frame)
        if package not in _BETWEEN:
            site.append((frame.f_code, frame.f_lasti))
            if package not in _CALLED_FROM_MANY:
                break
        frame = frame.f_back
    return tuple(site)


def _line(site: Site) -> str:
    code, instruction = site[-1]
    lines = [line for start, end, line in code.co_lines() if start <= instruction < end]
    return f"{code.co_filename}:{lines[0] if lines else code.co_firstlineno} ({code.co_name})"


def _refuse(site: Site, func: Any) -> Any:
    raise RuntimeError(
        f"{_line(site)}: `{func.__name__}` is called for a tensor whose heads are split over tensor-parallel ranks, by "
        "code that did not run when the plan was tried, so that it is not known which of its sizes are those of one "
        "rank. Set `example_input_array` on the LightningModule to an input for which it runs, or leave these layers "
        "out of `tensor_parallel_plan`."
    )
