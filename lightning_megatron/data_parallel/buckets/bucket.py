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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.data_parallel.buckets.flat_weights import FlatWeights, take_weights
from lightning_megatron.data_parallel.buckets.holders import Sharing
from lightning_megatron.data_parallel.buckets.host_memory import HostMemory
from lightning_megatron.data_parallel.buckets.shards import FlatPlacement, ShardPart, place, views
from lightning_megatron.mesh.messages.collectives import start_flat_gather, start_flat_scatter
from lightning_megatron.mesh.messages.of_weights import messages_of_weights
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
        host: in its place, what the optimizer steps on in host memory, where it does that.
        stepped: the one of both that is in the optimizer, and the key of its state.
    """

    name: str
    part: ShardPart
    update: nn.Parameter
    grad: Tensor
    host: nn.Parameter | None = None
    stepped: nn.Parameter = field(init=False)

    def __post_init__(self) -> None:
        self.stepped = self.update if self.host is None else self.host


@dataclass(frozen=True)
class WeightLayout:
    """How buckets keep weights.

    Attributes:
        lowered: by name, the dtype that layers compute with, where the optimizer keeps float32 instead.
        whole: whether every parameter must lie in one rank's shard, as the optimizer needs whole ones.
        gathers: whether the optimizer updates matrices that are assembled from the pieces of several ranks.
        rounds: whether gradients of 16-bit weights accumulate in float32 and are rounded for the update.
        memory: by the number of elements that a bucket adds, host memory for its master weights, or ``None``; where
            that is never asked for, ``None`` itself.
        hidden: names of parameters whose values come later, as far as this rank keeps them.
    """

    lowered: Mapping[str, torch.dtype] = field(default_factory=dict)
    whole: bool = False
    gathers: bool = False
    rounds: bool = True
    memory: Callable[[int], HostMemory | None] | None = None
    hidden: frozenset[str] = frozenset()


USUAL_LAYOUT = WeightLayout()


@dataclass
class Bucket:
    """Parameters of one dtype and one set of holders, whose gradients are summed by one collective.

    Invariants: ``flat`` is empty or has ``placement.total + len(parameters)`` elements; ``views[i]`` is parameter i's
    part of it; a parameter without ``touched[i]`` has undefined numbers there. With ``weights``, every
    ``parameter.data`` is a view of ``weights.flat`` and the optimizer holds ``pieces``, never the parameters.

    Attributes:
        names: of the parameters in the user's module, in the order of ``parameters``.
        sharing: the ranks that hold these parameters, and the groups their sums go over.
        shared: whether other stages, or tensor-parallel ranks, hold them too; such buckets are reduced last.
        placement: offset and size of each parameter in ``flat``, in elements, and of each rank's shard.
        flat: ``[total + n]`` main gradients one after the other, then one flag per parameter (was it touched?).
        views: by index of the parameter, its main gradient, shaped like the parameter.
        weights: the weights in the same layout; ``None`` where the optimizer updates the parameters themselves.
        pieces: parts of the parameters that lie in this rank's shard, by index of the parameter.
        touched: by index, whether a backward of this step has written the gradient.
        ready: indices whose last gradient of this step has arrived.
        work: the sum under way.
        gathering: the all-gather of weights under way.
        launched: whether this step's sum has been started.
        scattered: whether only this rank's shard of ``flat`` holds the sum.
        reduced: whether the gradients are sums over all holders, divided by what they are to be divided by.
        maxima: largest absolute value of each gradient before the sum, by name, where that was asked for.
        sent: copy of the gradients in the dtype in which they are summed, where that is not their own.
        shard_only: whether only this rank's shard of the sum is kept; ``flat`` is empty between steps.
        own: ``[shard]`` that shard, from the sum until the next backward.
        adds: whether shards of sums add up over the backwards of this batch.
        added: ``[shard]`` what they have come to, before the last of them.
    """

    names: list[str]
    parameters: list[nn.Parameter]
    sharing: Sharing
    shared: bool
    placement: FlatPlacement
    flat: Tensor
    views: list[Tensor]
    weights: FlatWeights | None = None
    pieces: dict[int, Piece] = field(default_factory=dict)
    touched: list[bool] = field(default_factory=list)
    ready: set[int] = field(default_factory=set)
    work: Any = None
    gathering: Any = None
    launched: bool = False
    scattered: bool = False
    reduced: bool = False
    maxima: dict[str, Tensor] = field(default_factory=dict)
    sent: Tensor | None = None
    shard_only: bool = False
    own: Tensor | None = None
    adds: bool = False
    added: Tensor | None = None

    @property
    def gradients(self) -> Tensor:
        """The main gradients without the flags."""
        return self.flat[: self.placement.total]

    @property
    def flags(self) -> Tensor:
        """One number per parameter: how many holders gave it a gradient."""
        return self.flat[self.placement.total :]

    @property
    def hosted(self) -> bool:
        """Whether the optimizer steps in host memory."""
        return self.weights is not None and self.weights.hosted

    @property
    def lies_apart(self) -> bool:
        """Whether this rank's shard of the weights is stored separately, so that the other shards can be freed."""
        return self.weights is not None and self.weights.low is not None

    @property
    def master(self) -> Tensor:
        """The weights that the optimizer updates; empty where it updates the parameters themselves."""
        return self.flat[:0] if self.weights is None else self.weights.master

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

    def allocate(self) -> None:
        """Make room for all gradients: uninitialized memory, except that the gaps between them are zero."""
        placement, dtype, device = self.placement, self.flat.dtype, self.flat.device
        self.flat = torch.empty(placement.total + len(self.parameters), dtype=dtype, device=device)
        end = 0
        for offset, size in zip((*placement.offsets, placement.total), (*placement.sizes, 0), strict=True):
            if end < offset:
                self.flat[end:offset].zero_()
            end = offset + size
        self.views = views(self.flat, placement, self.parameters, contiguous=self.weights is not None)
        if self.shard_only:
            self.own = torch.empty(placement.shard, dtype=dtype, device=device)
        self.point_pieces()

    def let_go(self) -> None:
        """Free all gradients but this rank's shard of the sum."""
        self.flat = self.flat.new_empty(0)
        self.views = [self.flat] * len(self.parameters)

    def keep_shard(self) -> None:
        """From this step on, keep only this rank's shard of the sum, in a buffer of its own; free the last step's.

        Called before the step's backward. ``own`` is freed here and allocated again when the first gradient arrives
        (`allocate`), so that activations and last step's gradients are never in memory together. The pieces must not
        keep it alive: they point at the empty ``flat`` until then, and the optimizer's parameters have no gradient.
        """
        self.shard_only, self.own = True, None
        for piece in self.pieces.values():
            piece.grad, piece.update.grad = self.flat, None

    def keep_all(self) -> None:
        """From now on keep all gradients in memory between steps; the shard's sum is carried over."""
        if self.keeps_all:
            return
        own, self.own, self.shard_only = self.own, None, False
        self.allocate()
        self.flat.zero_()
        if own is not None:
            self.own_gradients.copy_(own)

    def point_pieces(self) -> None:
        """Point the gradients of pieces at this rank's shard."""
        gradients = self.own_gradients
        for piece in self.pieces.values():
            piece.grad = piece.part.of(gradients).view(piece.update.shape)

    def resume(self, factor: float, replicas: int) -> None:
        """Prepare reduced gradients for further accumulation (no ``zero_grad`` since the last step).

        The sum over ranks will be taken and divided again, so what is a sum already must enter it once, times what it
        will be divided by. Each rank keeps its own shard, divided by how many ranks have the same, and zeros elsewhere;
        or all of it, divided by how many ranks sum: more than the replicas where stages or tensor-parallel ranks each
        have a term.

        Args:
            factor: what new gradients are scaled by (the loss scale), and the old ones have to be.
            replicas: what the sums were divided by, and will be divided by again.
        """
        if self.reduced and any(self.touched):
            if self.scattered:
                low, high = self.placement.bounds(self.sharing.rank)
                self.flat[:low].zero_()
                self.flat[high:].zero_()
                self.own_gradients.mul_(factor * replicas / _size_of(self.sharing.copy_group))
            elif (kept := factor * replicas / _size_of(self.sharing.group)) != 1.0:
                self.gradients.mul_(kept)
        self.reduced = self.scattered = False

    def start_sum(self, dtype: torch.dtype | None) -> None:
        """Start the sum over all holders: a reduce-scatter if ``scattered``, else an all-reduce of gradients and flags.

        Args:
            dtype: communication dtype of the sum; ``None`` for that of the buffer.
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
        """Wait for the sum; returns ``False`` if none was started."""
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
        """Wait for the sum under way."""
        if self.work is not None:
            with waits.on(self._told):
                self.work.wait()
            self.work = None

    def _told(self) -> waits.Waiting:
        """Description of the running sum or gather, for messages."""
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        what = f"gradients or weights of {self.names[0]}{more}, over {waits.members(self.sharing.group)}"
        return waits.Waiting(what, waits.ranks_of(self.sharing.group))

    def narrow_gradients(self) -> None:
        """Cast the float32 sums to the 16-bit dtype of the weights that the optimizer updates, for its step."""
        if self.weights is not None and not self.hosted and self.weights.master.dtype != self.flat.dtype:
            self._hand_over(self.own_gradients.to(self.weights.master.dtype))

    def widen_gradients(self) -> None:
        """After the optimizer's step, point its gradients at the float32 sums again, for hooks and accumulation."""
        if self.weights is not None and not self.hosted and self.weights.master.dtype != self.flat.dtype:
            self._hand_over(self.own_gradients)

    def _hand_over(self, gradients: Tensor) -> None:
        for piece in self.pieces.values():
            if piece.update.grad is not None:
                piece.update.grad = None
                piece.update.grad_dtype = gradients.dtype
                piece.update.grad = piece.part.of(gradients).view(piece.update.shape)

    def release_parameters(self) -> None:
        """Undo the float32 `grad_dtype` of 16-bit parameters, when the run ends."""
        for parameter in self.parameters if self.pieces else ():
            if parameter.grad_dtype != parameter.dtype:
                grad, parameter.grad = parameter.grad, None
                parameter.grad_dtype = parameter.dtype
                parameter.grad = None if grad is None else grad.to(parameter.dtype)

    def recover_weights(self) -> None:
        """Take over weights that user code replaced: ``parameter.data = ...``, or lowered weights written by hand."""
        if self.weights is not None:
            self.weights.recover(self.parameters)

    def show_weights(self) -> None:
        """Start to gather weights of which each rank stores only its shard; `finish_gather` waits."""
        if self.weights is not None:
            self.weights.show(self.parameters)
            self.start_gather()

    def hide_weights(self) -> None:
        """Free the weights, except for this rank's shard, where shards are stored separately."""
        if self.weights is not None:
            self.weights.hide(self.parameters)

    def start_gather(self) -> None:
        """Start the all-gather of the updated weights over the ranks that share them out; `finish_gather` waits."""
        if self.weights is None:
            return
        if self.weights.separate:
            self.weights.own.copy_(self.weights.master)
        if self.sharing.shards > 1 and self.weights.shown:
            with messages_of_weights:
                self.gathering = start_flat_gather(self.weights.flat, self.weights.own, self.sharing.shard_group)

    def finish_gather(self) -> None:
        """Wait for the all-gather, after which every weight is the updated one."""
        if self.gathering is not None:
            with waits.on(self._told):
                self.gathering.wait()
            self.gathering = None


def make_bucket(
    members: Sequence[tuple[str, nn.Parameter]],
    sharing: Sharing,
    *,
    shared: bool,
    layout: WeightLayout,
    apart: bool = False,
) -> Bucket:
    """Lay out a bucket and point its parameters at it.

    Args:
        members: names and parameters of one dtype.
        sharing: the ranks that hold them.
        shared: whether other stages or tensor-parallel ranks hold them too.
        layout: how weights are kept.
        apart: whether this rank's shard of the weights is to lie apart, so that the others can be freed.
    """
    names, parameters = [name for name, _ in members], [parameter for _, parameter in members]
    first, low = parameters[0], layout.lowered.get(names[0])
    narrow = layout.rounds and first.dtype in NARROW
    main = torch.float32 if narrow or low is not None else first.dtype
    moves = sharing.shards > 1 or main != first.dtype or low is not None or layout.gathers
    placement = place([parameter.numel() for parameter in parameters], sharing.shards, whole=layout.whole)
    flat = torch.empty(0, dtype=main, device=first.device)
    bucket = Bucket(names, parameters, sharing, shared, placement, flat, [flat] * len(parameters))
    bucket.touched = [False] * len(parameters)
    memory = None if layout.memory is None else layout.memory(placement.shard)
    if moves or layout.memory is not None:
        kept = (first.dtype, first.dtype) if low is None else (low, main)
        hidden = [index for index, name in enumerate(names) if name in layout.hidden]
        given: Any = {"gradients": main, "apart": apart, "memory": memory, "hidden": hidden}
        bucket.weights = take_weights(parameters, placement, sharing.rank, *kept, **given)
        _cut_pieces(bucket, bucket.weights, keep_shapes=layout.whole or sharing.shards == 1)
    return bucket


def _cut_pieces(bucket: Bucket, weights: FlatWeights, *, keep_shapes: bool) -> None:
    for part in bucket.placement.parts(bucket.sharing.rank):
        value, shape = part.of(weights.own if weights.hosted else weights.master), bucket.parameters[part.member].shape
        if keep_shapes or not shape:  # a number is never cut, and what optimizers keep for it has its shape
            value = value.view(shape)
        update = nn.Parameter(value)
        update.grad_dtype = bucket.flat.dtype
        host = nn.Parameter(part.of(weights.master).view(value.shape)) if weights.hosted else None
        bucket.pieces[part.member] = Piece(bucket.names[part.member], part, update, bucket.flat, host)


def _size_of(group: Any) -> int:
    """How many ranks a group has; 1 for ``None``."""
    return 1 if group is None else int(group.size())
