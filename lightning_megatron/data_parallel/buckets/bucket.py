"""One bucket: gradients of some parameters in a flat buffer and, where the optimizer is shared out, their weights too.

::

    flat      g0 g0 g0 g1 g1 g1 g1 g2 .  │ one flag per parameter      main gradients, all of them
    weights   w0 w0 w0 w1 w1 w1 w1 w2 .                                what the layers compute with
    master             w1 w1 w1 w1                                     this rank's shard, what the optimizer updates

Main gradients of 16-bit weights are float32. The master weights are a view of the weights, unless the optimizer is to
keep more digits than layers compute with: then they are float32, too. If they are not, the sum of the gradients is
rounded once, for the update. Where a step is one backward, ``flat`` is there from the last of its gradients until their
sum, and only this rank's shard of the sum stays; steps that add up several backwards keep it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.data_parallel.buckets.holders import Sharing
from lightning_megatron.data_parallel.buckets.shards import Part, Placement, place
from lightning_megatron.mesh.messages.collectives import start_flat_gather, start_flat_scatter
from lightning_megatron.mesh.watch import waits

NARROW = (torch.bfloat16, torch.float16)
"""Dtypes of weights whose gradients add up in float32."""


@dataclass
class Piece:
    """The part of a parameter that this rank's optimizer updates.

    Attributes:
        part: which elements, and where they lie in the shard.
        update: the parameter that stands in for it in the optimizer; a view of the master weights.
        grad: its gradient, a view of this rank's shard of the main gradients.
    """

    name: str
    part: Part
    update: nn.Parameter
    grad: Tensor


@dataclass
class Bucket:
    """Gradients that are summed together.

    Attributes:
        sharing: who holds these parameters.
        shared: whether other stages, or tensor-parallel ranks, hold them too; such buckets are reduced last.
        placement: where each parameter lies in ``flat``.
        flat: main gradients one after the other, then one flag per parameter (was it touched?).
        weights: the same layout; ``None`` where the optimizer updates the parameters themselves.
        master: this rank's shard of the weights.
        pieces: parts of the parameters in it, by index of the parameter.
        scattered: whether only this rank's shard of ``flat`` holds the sum.
        reduced: whether the gradients are sums over all holders, divided by what they are to be divided by.
        maxima: largest absolute value of each gradient before the sum, by name, where that was asked for.
        sent: what travels, while gradients are summed in another dtype than their own.
        shard_only: whether only this rank's shard of the sum is kept; ``flat`` is empty between steps.
        own: that shard, from the sum until the next backward.
    """

    names: list[str]
    parameters: list[nn.Parameter]
    sharing: Sharing
    shared: bool
    placement: Placement
    flat: Tensor
    views: list[Tensor]
    weights: Tensor | None = None
    master: Tensor | None = None
    weight_views: list[Tensor] = field(default_factory=list)
    pieces: dict[int, Piece] = field(default_factory=dict)
    touched: list[bool] = field(default_factory=list)
    ready: set[int] = field(default_factory=set)
    work: Any = None
    launched: bool = False
    scattered: bool = False
    reduced: bool = False
    maxima: dict[str, Tensor] = field(default_factory=dict)
    sent: Tensor | None = None
    shard_only: bool = False
    own: Tensor | None = None

    @property
    def gradients(self) -> Tensor:
        """The main gradients without the flags."""
        return self.flat[: self.placement.total]

    @property
    def flags(self) -> Tensor:
        """One number per parameter: how many holders gave it a gradient."""
        return self.flat[self.placement.total :]

    @property
    def keeps_all(self) -> bool:
        """Whether there is room for all gradients at all times."""
        return not self.shard_only and self.flat.numel() > 0

    @property
    def own_gradients(self) -> Tensor:
        """This rank's shard of the main gradients."""
        if self.own is not None:
            return self.own
        low, high = self.placement.bounds(self.sharing.rank)
        return self.flat[low:high]

    @property
    def own_weights(self) -> Tensor:
        """This rank's shard of the weights that the layers compute with."""
        assert self.weights is not None
        low, high = self.placement.bounds(self.sharing.rank)
        return self.weights[low:high]

    @property
    def lowered(self) -> bool:
        """Whether the layers compute with other numbers than the optimizer keeps."""
        return self.master is not None and self.weights is not None and self.master.dtype != self.weights.dtype

    def allocate(self) -> None:
        """Have room for all gradients; only the gaps between them are zero."""
        placement, dtype, device = self.placement, self.flat.dtype, self.flat.device
        self.flat = torch.empty(placement.total + len(self.parameters), dtype=dtype, device=device)
        end = 0
        for offset, size in zip((*placement.offsets, placement.total), (*placement.sizes, 0), strict=True):
            if end < offset:
                self.flat[end:offset].zero_()
            end = offset + size
        self.views = _views(self.flat, placement, self.parameters, contiguous=self.weights is not None)
        if self.shard_only:
            self.own = torch.empty(placement.shard, dtype=dtype, device=device)
        self._point_pieces()

    def let_go(self) -> None:
        """Keep nothing but this rank's shard of the sum."""
        self.flat = self.flat.new_empty(0)
        self.views = [self.flat] * len(self.parameters)

    def keep_shard(self) -> None:
        """Collect this rank's shard of the sums in a buffer of its own; the last step's is let go of."""
        self.shard_only, self.own = True, None
        for piece in self.pieces.values():
            piece.grad, piece.update.grad = self.flat, None

    def keep_all(self) -> None:
        """Keep room for all gradients from now on."""
        if self.keeps_all:
            return
        own, self.own, self.shard_only = self.own, None, False
        self.allocate()
        self.flat.zero_()
        if own is not None:
            self.own_gradients.copy_(own)

    def _point_pieces(self) -> None:
        gradients = self.own_gradients
        for piece in self.pieces.values():
            piece.grad = piece.part.of(gradients).view(piece.update.shape)

    def resume(self, factor: float, replicas: int) -> None:
        """Go on adding to sums: bring them to the scale of what is added, and count what each rank holds once.

        Args:
            factor: scale of the loss.
            replicas: what the sums were divided by besides, and will be again.
        """
        if self.reduced and any(self.touched):
            if self.scattered:
                low, high = self.placement.bounds(self.sharing.rank)
                self.flat[:low].zero_()
                self.flat[high:].zero_()
                self.own_gradients.mul_(factor * replicas)
            elif factor != 1.0:
                self.gradients.mul_(factor)
        self.reduced = self.scattered = False

    def start_sum(self, dtype: torch.dtype | None) -> None:
        """Start summing over all holders: this rank's shard if ``scattered``, else everything and the flags.

        Args:
            dtype: in which the numbers travel and are added; ``None`` for that of the buffer.
        """
        self.sent = None if dtype in (None, self.flat.dtype) else self.flat.to(dtype)
        flat = self.flat if self.sent is None else self.sent
        if not self.scattered:
            self.work = dist.all_reduce(flat, group=self.sharing.group, async_op=True)
            return
        low, high = self.placement.bounds(self.sharing.rank)
        own = self.own_gradients if self.sent is None else self.sent[low:high]
        self.work = start_flat_scatter(own, flat[: self.placement.total], self.sharing.shard_group)

    def finish_sum(self) -> bool:
        """Wait for the sum; returns whether one was under way."""
        if self.work is None:
            return False
        self._wait()
        kept = self.own_gradients if self.scattered else self.flat
        summed = kept
        if self.sent is not None:
            low, high = self.placement.bounds(self.sharing.rank) if self.scattered else (0, self.sent.numel())
            summed = self.sent[low:high]
        if self.scattered and self.sharing.copy_group is not None:
            with waits.on(self._told):
                dist.all_reduce(summed, group=self.sharing.copy_group)
        if self.sent is not None:
            kept.copy_(summed)
            self.sent = None
        return True

    def _wait(self) -> None:
        """Wait for the sum or the gather under way."""
        if self.work is not None:
            with waits.on(self._told):
                self.work.wait()
            self.work = None

    def _told(self) -> waits.Waiting:
        """What the sum or the gather under way is about, in words."""
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        what = f"gradients or weights of {self.names[0]}{more}, over {waits.members(self.sharing.group)}"
        return waits.Waiting(what, waits.ranks_of(self.sharing.group))

    def narrow_gradients(self) -> None:
        """Round the sums to the dtype of what the optimizer updates, until `widen_gradients`."""
        if self._rounds:
            assert self.master is not None
            self._hand_over(self.own_gradients.to(self.master.dtype))

    def widen_gradients(self) -> None:
        """Give the sums back all their digits."""
        if self._rounds:
            self._hand_over(self.own_gradients)

    @property
    def _rounds(self) -> bool:
        return self.master is not None and self.master.dtype != self.flat.dtype

    def _hand_over(self, gradients: Tensor) -> None:
        for piece in self.pieces.values():
            if piece.update.grad is not None:
                piece.update.grad = None
                piece.update.grad_dtype = gradients.dtype
                piece.update.grad = piece.part.of(gradients).view(piece.update.shape)

    def release_parameters(self) -> None:
        """Let gradients of the parameters have the parameters' dtype again."""
        for parameter in self.parameters if self.pieces else ():
            if parameter.grad_dtype != parameter.dtype:
                grad, parameter.grad = parameter.grad, None
                parameter.grad_dtype = parameter.dtype
                parameter.grad = None if grad is None else grad.to(parameter.dtype)

    def recover_weights(self) -> None:
        """Bring back what left the buffer: weights assigned with ``parameter.data = ...``, masters of weights that
        were changed by hand.
        """
        if self.weights is None:
            return
        for parameter, view in zip(self.parameters, self.weight_views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.data)
                parameter.data = view
        if self.lowered:
            assert self.master is not None
            own = self.own_weights
            changed = own != self.master.to(own.dtype)
            self.master.copy_(torch.where(changed, own.to(self.master.dtype), self.master))

    def start_gather(self) -> None:
        """Send this rank's updated shard to the others, and receive theirs; :meth:`finish_gather` waits."""
        if self.weights is None:
            return
        if self.lowered:
            assert self.master is not None
            self.own_weights.copy_(self.master)
        if self.sharing.shards > 1:
            self.work = start_flat_gather(self.weights, self.own_weights, self.sharing.shard_group)

    def finish_gather(self) -> None:
        """Wait until the weights of all shards are here."""
        self._wait()


def make_bucket(
    members: Sequence[tuple[str, nn.Parameter]],
    sharing: Sharing,
    *,
    shared: bool,
    lowered: Mapping[str, torch.dtype],
    whole: bool = False,
    gathers: bool = False,
    rounds: bool = True,
) -> Bucket:
    """Lay out a bucket and point its parameters at it.

    Args:
        members: names and parameters of one dtype.
        sharing: who holds them.
        shared: whether other stages or tensor-parallel ranks do.
        lowered: names of parameters that layers use in another dtype than the optimizer's, and that dtype.
        whole: whether no parameter may be cut.
        gathers: whether the optimizer updates matrices that are put together from the pieces of several ranks.
        rounds: whether gradients of 16-bit weights may add up in float32, to be rounded for the update.
    """
    names, parameters = [name for name, _ in members], [parameter for _, parameter in members]
    first, low = parameters[0], lowered.get(names[0])
    narrow = rounds and first.dtype in NARROW
    main = torch.float32 if narrow or low is not None else first.dtype
    moves = sharing.shards > 1 or main != first.dtype or low is not None or gathers
    placement = place([parameter.numel() for parameter in parameters], sharing.shards, whole=whole)
    flat = torch.empty(0, dtype=main, device=first.device)
    bucket = Bucket(names, parameters, sharing, shared, placement, flat, [flat] * len(parameters))
    bucket.touched = [False] * len(parameters)
    if moves:
        _take_weights(bucket, low or first.dtype, first.dtype if low is None else main)
        _cut_pieces(bucket, keep_shapes=whole or sharing.shards == 1)
    return bucket


def _take_weights(bucket: Bucket, dtype: torch.dtype, master: torch.dtype) -> None:
    """Move the weights of the parameters into the bucket, and this rank's shard of them into the master weights.

    Args:
        bucket: has no weights yet.
        dtype: of what layers compute with.
        master: dtype of what the optimizer updates.
    """
    placement, sharing, main = bucket.placement, bucket.sharing, bucket.flat.dtype
    bucket.weights = torch.zeros(placement.total, dtype=dtype, device=bucket.flat.device)
    bucket.master = bucket.own_weights if dtype == master else bucket.own_weights.to(master)
    for part in placement.parts(sharing.rank):
        source = bucket.parameters[part.member].data.reshape(-1)[part.start : part.stop]
        part.of(bucket.master).copy_(source)
    for parameter, offset in zip(bucket.parameters, placement.offsets, strict=True):
        view = bucket.weights[offset : offset + parameter.numel()].view(parameter.shape)
        view.copy_(parameter.data)
        parameter.grad = None
        parameter.data = view
        if dtype != main:
            parameter.grad_dtype = main
        bucket.weight_views.append(view)


def _cut_pieces(bucket: Bucket, *, keep_shapes: bool) -> None:
    assert bucket.master is not None
    for part in bucket.placement.parts(bucket.sharing.rank):
        value, shape = part.of(bucket.master), bucket.parameters[part.member].shape
        if keep_shapes or not shape:  # a number is never cut, and what optimizers keep for it has its shape
            value = value.view(shape)
        update = nn.Parameter(value)
        update.grad_dtype = bucket.flat.dtype
        bucket.pieces[part.member] = Piece(bucket.names[part.member], part, update, bucket.flat)


def _views(flat: Tensor, placement: Placement, parameters: Sequence[nn.Parameter], *, contiguous: bool) -> list[Tensor]:
    if contiguous and sum(placement.sizes[:-1]) == placement.offsets[-1]:  # no gaps: one call for all
        return list(torch._C._nn.unflatten_dense_tensors(flat[: sum(placement.sizes)], [*parameters]))
    return [
        _view_like(flat[offset : offset + parameter.numel()], parameter, contiguous=contiguous)
        for offset, parameter in zip(placement.offsets, parameters, strict=True)
    ]


def _view_like(flat: Tensor, parameter: nn.Parameter, *, contiguous: bool) -> Tensor:
    """View of ``flat`` with the parameter's shape and, if dense, its strides, which autograd wants of ``.grad``."""
    if contiguous or parameter.is_contiguous():
        return flat.view(parameter.shape)
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    if parameter.permute(order).is_contiguous():
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
    return flat.view(parameter.shape)
