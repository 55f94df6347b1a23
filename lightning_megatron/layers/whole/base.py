"""A tensor of global shape of which this rank holds a part: code written for the whole tensor runs on it unchanged.

A function of torch that is given one is looked up in a table of rules. A rule computes the same value from the parts,
with little or no communication; there are rules for pointwise functions, views, reductions, products and losses. Any
other function gathers the whole tensor and runs on that, with gradients. Which ones did is counted in ``GATHERED``
and logged once. Gathering is a collective: code that does it must do it on every rank of the group.

Functions that bypass ``__torch_function__`` (``autograd.Function.apply``, ``torch.func``, operators written in C++)
see an ordinary differentiable tensor, because every `WholeTensor` is an output of autograd's own graph as well::

    local part ──Show──▶ WholeTensor ──custom Function──▶ WholeTensor or Tensor
        │                                                     │
        └──rules──▶ local part of the next WholeTensor ◀──Enter┘

Rules compute with local parts and never look at the upper row. What a custom function returned comes back to the
lower row when a rule first needs its part. A gradient on the upper row has global shape: a `WholeTensor`, or an
ordinary tensor that is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_megatron.layers.whole.gathered_views import GatheredCopy, ShownFirst, note_write, view_of, writes_of
from lightning_megatron.layers.whole.split_dim import SplitDim
from lightning_megatron.mesh.autograd import version_of
from lightning_megatron.mesh.torch_functions import METADATA, by_place, is_in_place, name_of

Rule = Callable[..., Any]
"""``rule(func, *args, **kwargs)``: the result, or raises `NeedsWhole`."""

GATHERED: Counter[str] = Counter()
"""How often each function gathered a tensor in this process, by name of the function."""

_log = logging.getLogger(__name__)


class NeedsWhole(Exception):
    """No rule computes this from the parts."""


class WholeTensor(torch.Tensor):
    """A tensor of global shape [.., length, ..] of which this rank holds [.., block, ..].

    Invariants: ``shape`` is the global one, equal on all ranks of the group. A rule's result holds a part too, or is an
    ordinary tensor that is equal on all of them; any other function gets, and gives, ordinary whole tensors.

    Attributes:
        rules: the functions that run on parts.
        along: the dim of ``length``, which is cut; not negative.
        spread: which of its indices each rank holds.
    """

    rules: ClassVar[Mapping[Any, Rule]] = {}
    along: int
    spread: SplitDim
    _local: Tensor
    _entered: Any = None

    @classmethod
    def show(cls, local: Tensor, split: SplitDim, dim: int) -> Self:
        """The global tensor of which ``local`` is this rank's part.

        Args:
            local: [.., block, ..]
            split: how ``dim`` is cut.
            dim: the dim that is cut; not negative.
        """
        if local.requires_grad and torch.is_grad_enabled():
            return cast(Self, _Show.apply(local, cls, split, dim))
        made: Self = _make(cls, local, split, dim)
        return made

    def like(self, local: Tensor, dim: int | None = None, split: SplitDim | None = None) -> Self:
        """Another part of a tensor that is cut in the same way, maybe along another ``dim`` or by another ``split``."""
        return self.show(local, split or self.spread, self.along if dim is None else dim)

    def local(self) -> Tensor:
        """This rank's part, padding included: [.., block, ..]."""
        _enter(self)
        return self._local

    def held(self) -> Tensor:
        """This rank's part without padding: [.., held, ..]; a view."""
        return self.spread.held(self.local(), self.along)

    def from_held(self, held: Tensor) -> Self:
        """A tensor of this one's shape, from its values at the indices held here."""
        return self.like(self.spread.pad(held, self.along, self._local.shape[self.along]))

    def full(self) -> Tensor:
        """The whole tensor on every rank, as an ordinary one; a collective over the group."""
        return self.spread.join(self.local(), self.along)

    def part_of(self, whole: Tensor, dim: int | None = None) -> Tensor:
        """The part of an ordinary tensor that belongs to this rank's indices: [.., length, ..] -> [.., held, ..]."""
        dim, block = self.along if dim is None else dim, self._local.shape[self.along]
        if whole.requires_grad:
            return self.spread.held(self.spread.take(whole, dim, block), dim)
        return self.spread.take_held(whole, dim, block)

    @property
    def writes(self) -> int:
        """How often the memory of the part was written to, on any rank."""
        return writes_of(self._local)

    @property
    def is_by_rows(self) -> bool:
        """Whether each vector along the last dim is here as a whole, or not at all."""
        return self.along < self.ndim - 1

    def alike(self, other: WholeTensor) -> bool:
        """Whether the other tensor has this one's shape and is cut in the same way."""
        alike = self.shape == other.shape and self.along == other.along and self.spread == other.spread
        return alike and self._local.shape == other._local.shape

    def take_from(self, whole: Tensor) -> None:
        """Hold this rank's part of a changed copy: [.., length, ..]."""
        self.held().copy_(self.part_of(whole))
        self.changed()

    def changed(self) -> None:
        """Follow a change of the local part in place: in autograd's graph, and in the count of versions."""
        note_write(self._local)
        if self._local.requires_grad and torch.is_grad_enabled():
            _supersede(self)
            _Reshow.apply(self, self._local)
        else:
            torch.autograd.graph.increment_version(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        local = tuple(self._local.shape)
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, local={local})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.full().detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full().detach().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if len(types) > 1 and any(issubclass(kind, ShownFirst) for kind in types):
            return NotImplemented
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        func, args, kwargs = by_place(func, args, kwargs)
        shown = list(_shown((*args, *kwargs.values())))
        if list(_shown((kwargs.get("out"),))):
            raise RuntimeError(
                f"`{name_of(func)}(out=...)` would write into a tensor that is split over "
                f"{shown[0].spread.group.size()} ranks ({shown[0]!r}); assign its result instead."
            )
        for tensor in shown:
            _enter(tensor)
        writes = kwargs.get("out") is not None  # into an ordinary tensor, which is whole
        rule = shown[0].rules.get(func) if shown and not writes else None
        if rule is not None:
            with contextlib.suppress(NeedsWhole):
                return rule(func, *args, **kwargs)
        return _on_whole(func, args, kwargs, shown)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in _ALIASES:
            return _make(type(args[0]), args[0]._local.detach(), args[0].spread, args[0].along)
        shown = list(_shown((*args, *kwargs.values())))
        _note(func, shown)
        wholes = {id(tensor): _whole_values(tensor) for tensor in shown}
        given = tree_map(lambda value: wholes.get(id(value), value), (args, kwargs))
        found = func(*given[0], **given[1])
        if not func._schema.is_mutable:
            return found
        for described, value in zip(func._schema.arguments, args, strict=False):
            if isinstance(value, WholeTensor) and described.alias_info is not None and described.alias_info.is_write:
                _write(value, wholes[id(value)])
        originals = {id(wholes[id(tensor)]): tensor for tensor in shown}
        return tree_map(lambda value: originals.get(id(value), value), found)


def _make(kind: type[Any], local: Tensor, split: SplitDim, dim: int) -> Any:
    """A tensor without values of its own: code that reads its memory gets an error and no numbers."""
    shape = (*local.shape[:dim], split.length, *local.shape[dim + 1 :])
    shown = torch.Tensor._make_wrapper_subclass(
        kind, shape, dtype=split.dtype_of(local), device=local.device, requires_grad=False
    )
    torch._C._set_throw_on_mutable_data_ptr(shown)
    shown._local, shown.spread, shown.along = local, split, dim
    return shown


def _shown(values: Iterable[Any]) -> Iterator[WholeTensor]:
    """Tensors of this kind among arguments, and in lists and tuples of them."""
    for value in values:
        if isinstance(value, WholeTensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _shown(value)


def _on_whole(func: Any, args: Any, kwargs: Any, shown: list[WholeTensor]) -> Any:
    """Run a function on gathered tensors."""
    if is_in_place(func, kwargs):
        if isinstance(args[0], WholeTensor):
            return _in_place(func, *args, **kwargs)
        if list(_shown(args[:1])):
            return one_at_a_time(func, *args, **kwargs)
    _note(func, shown)
    wholes = {id(tensor): tensor.full() for tensor in shown}
    versions = {key: version_of(whole) for key, whole in wholes.items()}
    args, kwargs = tree_map(lambda value: wholes.get(id(value), value), (args, kwargs))
    found = func(*args, **kwargs)
    if shown and shown[0].spread.group.size() > 1 and any(version_of(w) != versions[key] for key, w in wholes.items()):
        raise RuntimeError(f"`{name_of(func)}` changes a split tensor in place; use its result, with `inplace=False`.")
    copies = {wholes[id(tensor)].untyped_storage()._cdata: GatheredCopy(tensor, wholes[id(tensor)]) for tensor in shown}
    return tree_map(lambda value: view_of(value, copies), found)


def one_at_a_time(func: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
    """Change a list of tensors in place as ``torch._foreach_*_`` does, each by the method of a single one."""
    single = getattr(Tensor, name_of(func).removeprefix("_foreach_"), None)
    if single is None:
        raise RuntimeError(f"`{name_of(func)}` changes a list of split tensors in place; change one at a time.")
    for index, tensor in enumerate(tensors):
        single(tensor, *(value[index] if isinstance(value, list | tuple) else value for value in args), **kwargs)


def _in_place(func: Any, target: WholeTensor, *args: Any, **kwargs: Any) -> WholeTensor:
    """Run an in-place function on the whole tensor and keep this rank's part of the result."""
    _note(func, [target])
    args, kwargs = tree_map(lambda v: v.full() if isinstance(v, WholeTensor) else v, (args, kwargs))
    whole = target.full().clone()
    func(whole, *args, **kwargs)
    if whole.shape != target.shape:
        raise RuntimeError(
            f"`{name_of(func)}` changes the shape {tuple(target.shape)} of a split tensor to {tuple(whole.shape)} in "
            f"place; use `{name_of(func).rstrip('_')}` and its result."
        )
    target.take_from(whole)
    return target


def _write(target: WholeTensor, whole: Tensor) -> None:
    with torch.no_grad():
        target.held().copy_(target.part_of(whole))
    note_write(target._local)


def _whole_values(shown: WholeTensor) -> Tensor:
    """The whole tensor outside of autograd, for an operator below it."""
    with torch.no_grad():
        return shown.spread.join(shown._local.detach(), shown.along).clone()


def _note(func: Any, shown: list[WholeTensor]) -> None:
    name = name_of(func)
    GATHERED[name] += 1
    if GATHERED[name] == 1 and shown and shown[0].spread.group.rank() == 0:
        tensor = shown[0]
        _log.info(
            "`%s` reads a tensor of shape %s that is split over %d ranks: it is gathered each time, %.1f MB.",
            *(name, tuple(tensor.shape), tensor.spread.group.size(), tensor.numel() * tensor.element_size() / 1e6),
        )


class _Show(torch.autograd.Function):
    """Lower row to upper row: a local part becomes a differentiable tensor of global shape."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, kind: type[WholeTensor], split: SplitDim, dim: int) -> Any:
        ctx.shown, ctx.node, ctx.superseded = (local, split, dim), local.grad_fn, False
        return _make(kind, local, split, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _local_gradient(ctx, grad), None, None, None


class _Reshow(torch.autograd.Function):
    """The same for a tensor whose local part was changed in place."""

    @staticmethod
    def forward(ctx: Any, shown: WholeTensor, local: Tensor) -> Any:
        ctx.shown, ctx.node, ctx.superseded = (local, shown.spread, shown.along), local.grad_fn, False
        ctx.mark_dirty(shown)
        return shown

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, _local_gradient(ctx, grad)


class _Enter(torch.autograd.Function):
    """Upper row to lower row: the local part of what a custom function returned."""

    @staticmethod
    def forward(ctx: Any, shown: WholeTensor) -> Tensor:
        ctx.shown = (type(shown), shown.spread, shown.along)
        return shown._local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        kind, split, dim = ctx.shown
        return kind.show(grad, split, dim)


def _local_gradient(ctx: Any, grad: Tensor) -> Tensor:
    local, split, dim = ctx.shown
    split.refuse_bypass(grad.shape)
    if local.grad_fn is not ctx.node and not ctx.superseded:
        raise RuntimeError(
            f"a custom function took a split tensor of shape {tuple(grad.shape)} after a view of it had been changed "
            "in place, so its gradient is not known; change a clone instead."
        )
    if isinstance(grad, WholeTensor) and grad.spread == split and grad.along == dim:
        return grad.local()
    part: Tensor = split.take(grad.full() if isinstance(grad, WholeTensor) else grad, dim, local.shape[dim])
    return part


def _node(shown: WholeTensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return shown.grad_fn


def _supersede(shown: WholeTensor) -> None:
    node = _node(shown)
    if isinstance(node, _OWN):
        cast(Any, node).superseded = True


_OWN: tuple[Any, ...] = (cast(Any, _Show)._backward_cls, cast(Any, _Reshow)._backward_cls)


def _enter(shown: WholeTensor) -> None:
    """Give a tensor that a custom function returned a local part with a graph.

    And one that autograd has saved, such as an input of a checkpoint in another: its part comes back detached, and
    functions of it would save less than they did.
    """
    node = _node(shown)
    if node is None or node is shown._entered:
        return
    if isinstance(node, _OWN):
        if shown._local.requires_grad or not torch.is_grad_enabled():
            return
    else:
        shown.spread.refuse_bypass(shown.shape)
    with torch.enable_grad():
        shown._local = cast(Tensor, _Enter.apply(shown))
    shown._entered = node


_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
