"""Shares the input of column-parallel layers that read the same tensor: one collective for all of them."""

from __future__ import annotations

import copy
import weakref
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.layers.all_here import all_tokens_here
from lightning_megatron.layers.multiply.products import PendingProducts, Products, sharded_product, share_input
from lightning_megatron.layers.multiply.weight_view import TRANSPOSED, WHOLE, Operand, autocast_input
from lightning_megatron.layers.streams import RankStream
from lightning_megatron.mesh.messages.collectives import raw_all_gather
from lightning_megatron.mesh.pickling import OfOneRank


class Splitting(Protocol):
    """A layer whose weight gradient a split backward may compute later."""

    put_off: Any
    weight: Any
    transposed: bool
    _sharding: Any


class Member(Splitting, Protocol):
    """The attributes of a column-parallel layer that `ColumnEntry` reads."""

    bias: Any
    training: bool
    products: Products


def operand_of(layer: Splitting) -> Operand:
    """The part of its weight that a layer multiplies by."""
    rows = getattr(layer._sharding, "rows", None)
    if rows is None:
        return TRANSPOSED if layer.transposed else WHOLE
    return Operand(rows, layer.transposed)


def may_put_off(layer: Splitting, x: Tensor) -> bool:
    """Whether a split backward may compute the gradient of a layer's weight later.

    That needs a layer that uses all rows of its parameter, a weight without hooks that requires a gradient, and an
    input ``x`` that requires one, so that autograd runs the node of the layer at all.
    """
    whole = getattr(layer._sharding, "rows", None) is None
    weight = layer.weight
    return (
        layer.put_off is not None and whole and x.requires_grad and weight.requires_grad and not weight._backward_hooks
    )


class ColumnEntry(OfOneRank):
    """The shared input of the column-parallel layers that read one tensor (query, key and value; gate and up).

    The first member that is called with a tensor prepares it for all members: one all-gather in the forward under
    sequence parallelism, one all-reduce or reduce-scatter in the backward. The entry drops its references once every
    member has been called, or when the row-parallel layer at the end of the region calls `forget`.

    Args:
        group: the tensor group.
        gather_dim: dim along which the input is split (sequence parallelism), or None when it is replicated.
        stream: stream for dropout from here to the row-parallel layer, if any.
        reduces: whether this entry gathers the input and sums its gradient; False where an earlier layer does both.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        gather_dim: int | None = None,
        stream: RankStream | None = None,
        reduces: bool = True,
    ) -> None:
        self.group = group
        self.reduces = reduces
        self._shared_dim = gather_dim
        self.stream = stream
        self.members: list[Member] = []
        self._source: weakref.ref[Tensor] | None = None
        self._shared: tuple[Tensor, ...] = ()
        self._pending = PendingProducts(0)
        self._waiting: set[int] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> ColumnEntry:
        copied = ColumnEntry(self.group, self._shared_dim, copy.deepcopy(self.stream, memo), self.reduces)
        memo[id(self)] = copied
        copied.members = [copy.deepcopy(member, memo) for member in self.members]
        return copied

    @property
    def gather_dim(self) -> int | None:
        """Dim along which the input is split, or None when every rank has all of it."""
        return None if all_tokens_here() else self._shared_dim

    def product(self, member: Member, x: Tensor) -> Tensor:
        """Local output of ``member``. x: [.., in] -> [.., out / group]; a collective under sequence parallelism."""
        index, bias = self.members.index(member), member.bias
        weight_part = operand_of(member)
        part = WHOLE if weight_part.rows is None else Operand(weight_part.rows)
        if not torch.is_grad_enabled():
            gathered = autocast_input(self._gathered(x))
            self._open_stream(member, gathered)
            bias = None if bias is None else part.of(bias)
            return member.products.product(gathered, weight_part.of(member.weight), bias)
        self._bring_in(x, index)
        self._open_stream(member, self._shared[0])
        shared, weight, pending = self._shared[0], self._shared[1 + index], self._pending
        self._waiting.discard(index)
        if not self._waiting:
            self.forget()
        put_off = member.put_off if may_put_off(member, shared) else None
        if put_off is not None and bias is not None:
            bias = bias.detach()
        return sharded_product(shared, weight, bias, pending, index, put_off, member.products, part)

    def forget(self) -> None:
        """Drop the references to the shared input."""
        self._source, self._shared, self._waiting = None, (), set()

    def _dim(self, x: Tensor) -> int | None:
        """Gather dim of ``x``; tokens that were flattened to [tokens, hidden] are gathered along dim 0."""
        return self.gather_dim if self.gather_dim is None or x.dim() > 2 else 0

    def _gathered(self, x: Tensor) -> Tensor:
        if self.gather_dim is None:
            return x
        if self._source is None or self._source() is not x or len(self._shared) != 1:
            self._shared = (raw_all_gather(x, self._dim(x) or 0, self.group),)
            self._source = weakref.ref(x)
        return self._shared[0]

    def _bring_in(self, x: Tensor, index: int) -> None:
        if self._source is not None and self._source() is x and index in self._waiting:
            return
        weights = [
            (member.weight.detach() if may_put_off(member, x) else member.weight, operand_of(member))
            for member in self.members
        ]
        self._pending = PendingProducts(len(weights))
        group = self.group if self.reduces else None
        self._shared = share_input(autocast_input(x), weights, self._pending, group, self._dim(x))
        self._source, self._waiting = weakref.ref(x), set(range(len(weights)))

    def _open_stream(self, member: Member, x: Tensor) -> None:
        if self.stream is not None:
            self.stream.open(x.device, x.shape[:-1], training=member.training)
