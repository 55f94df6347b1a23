"""The tensors that cross between two stages in one micro-batch.

Autograd ends at a boundary and begins again on the other side. There a received tensor has to be the start of a graph
and yet like any other inside a module: a layer may write into it, which autograd forbids for leaves. So it hangs on a
function that hands its gradient out, unless the first run has shown that no layer does such a thing::

    stage 0   ... ──▶ x ──send──▶   stage 1   x ◀─ arrival ──▶ layers ──▶ ...
                  ◀── g ◀──send──             grads[0] = g ◀── layers ◀── ...
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_megatron.mesh.autograd import count_back
from lightning_megatron.mesh.messages.joint_backwards import JointBackwards
from lightning_megatron.pipeline.elsewhere.effects import Effect
from lightning_megatron.pipeline.stage.forms import Forms


@dataclass(frozen=True)
class Leaf:
    """One tensor of a boundary: its place among the flattened call arguments (-1: it is none of them), and what the
    receiver must allocate; of a tensor whose tokens are split, this rank's rows, and how they are split; whether each
    of the tensor ranks that share tokens has all of them.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    tokens: Hashable = None
    all_here: bool = False


@dataclass(frozen=True)
class Span:
    """Samples ``start`` to ``stop`` of a batch of ``total``."""

    start: int
    stop: int
    total: int

    def dim_of(self, whole: tuple[int, ...], part: tuple[int, ...]) -> int | None:
        """The dimension along which a tensor of the batch has to be cut to give that of these samples; ``None`` where
        both are alike.

        Raises:
            RuntimeError: they differ otherwise than by the number of samples.
        """
        dims = [dim for dim, (one, other) in enumerate(zip(whole, part, strict=False)) if one != other]
        if len(whole) == len(part) and not dims:
            return None
        samples, dim = self.stop - self.start, dims[0] if dims else 0
        if len(whole) != len(part) or len(dims) != 1 or whole[dim] * samples != part[dim] * self.total:
            raise RuntimeError(
                f"the code around the layers gives a tensor of shape {whole} for a batch of {self.total} samples and "
                f"{part} for {samples} of them, which differ otherwise than by the number of samples. Cut or pad in "
                "the collator, so that all micro-batches are alike, or set `micro_batch_size` to the batch size, and "
                "`variable_shapes=True`."
            )
        return dim


@dataclass
class Boundary:
    """The values that cross between two stages in one micro-batch: tensors, their description, and returning gradients.

    Attributes:
        leaves: descriptions of the tensors.
        tensors: the hidden state first, then further arguments, then numbers of ``effects``.
        grads: gradients of tensors that are no leaves of autograd, by place.
        effects: what layers have left behind besides their outputs; ``None`` where they leave nothing.
        forms: what calls have returned so far, without the numbers; ``None`` where nobody has told.
        span: where the tensors are of a whole batch, to be cut when it is seen how: the samples of this micro-batch.
        dims: place -> dimension along which its tensor was cut; none where all samples share it.
        given: later layer -> index among its flattened call arguments -> the tensor it was given for a stand-in, and is
            given again if user code recomputes it.
    """

    leaves: tuple[Leaf, ...] = ()
    tensors: list[Tensor] = field(default_factory=list)
    grads: dict[int, Tensor] = field(default_factory=dict)
    effects: tuple[Effect, ...] | None = None
    forms: Forms | None = None
    span: Span | None = None
    dims: dict[int, int] = field(default_factory=dict)
    given: dict[int, dict[int, Any]] = field(default_factory=dict)
    _versions: dict[int, int] = field(default_factory=dict)

    def note_given(self, layer: int, before: list[Any], after: list[Any]) -> list[Any]:
        """Note which of a layer's flattened call arguments were replaced. Returns ``after``."""
        pairs = enumerate(zip(before, after, strict=True))
        replaced = {at: new for at, (old, new) in pairs if new is not old}
        if replaced:
            self.given[layer] = replaced
        return after

    def cut(self, place: int, like: Any) -> None:
        """Leave, of the tensor at ``place``, which is of a whole batch, the samples of this micro-batch.

        Args:
            place: of the tensor.
            like: what stands for it in the micro-batch; tells by its shape along which dimension the samples lie.
                ``None`` where a micro-batch by itself has no such argument: along the first, if any.

        Raises:
            RuntimeError: it does not tell.
        """
        if self.span is None:
            return
        whole, span = self.tensors[place], self.span
        shape = tuple(whole.shape if like is None else getattr(like, "shape", ()))
        if like is None and shape[:1] == (span.total,):
            shape = (span.stop - span.start, *shape[1:])
        dim = span.dim_of(tuple(whole.shape), shape)
        if dim is not None:
            self.dims[place] = dim
            whole = whole.narrow(dim, whole.shape[dim] * span.start // span.total, shape[dim])
        part = whole.detach().clone(memory_format=torch.contiguous_format)
        self.tensors[place] = part.requires_grad_(self.leaves[place].requires_grad and torch.is_grad_enabled())

    def arrive(self, place: int) -> Tensor:
        """The tensor at ``place``, for the stage's layers to use."""
        tensor = self.tensors[place]
        if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
            tensor = self.tensors[place] = arrive(tensor, self.grads, place)
            self._versions[place] = tensor._version
        return tensor

    def handed_on(self, *, writes: bool, training: bool) -> Boundary:
        """The values sent, as the next piece receives them that is on this very rank.

        Args:
            writes: whether it may write into the tensors, of which it then has numbers of its own, as the backward of
                this piece may need them as they are.
            training: whether a backward follows.
        """
        tensors = [tensor.detach().clone() if writes else tensor.detach() for tensor in self.tensors]
        if training:
            tensors = [t.requires_grad_(leaf.requires_grad) for t, leaf in zip(tensors, self.leaves, strict=True)]
        return Boundary(self.leaves, tensors, effects=self.effects, forms=self.forms)

    @property
    def written(self) -> bool:
        """Whether somebody wrote into a tensor that arrived."""
        return any(self.tensors[place]._version != version for place, version in self._versions.items())

    @property
    def reached(self) -> bool:
        """Whether a backward has come to any of the tensors."""
        return any(grad is not None for grad in self.gradients())

    def gradients(self) -> list[Tensor | None]:
        """The gradient of every tensor that wants one; ``None`` where nothing depended on it."""
        return [gradient for _, gradient in self.with_gradients()]

    def with_gradients(self) -> list[tuple[Tensor, Tensor | None]]:
        """Every tensor that wants a gradient, with it."""
        wanted = [(place, tensor) for place, tensor in enumerate(self.tensors) if tensor.requires_grad]
        return [(tensor, tensor.grad if tensor.is_leaf else self.grads.get(place)) for place, tensor in wanted]


class Announcement(NamedTuple):
    """A stage's description of the tensors that it is about to send."""

    leaves: tuple[Leaf, ...]
    effects: tuple[Effect, ...] | None = None
    forms: Forms | None = None

    def check(self, later: Announcement) -> None:
        """Complain if it is not true of a later micro-batch of the same shapes.

        Raises:
            RuntimeError: naming what differs.
        """
        if self.leaves != later.leaves:
            before, now = ([leaf.shape for leaf in told.leaves] for told in (self, later))
            what = f"activations between layers: {before} before, {now} now"
        elif self.forms is not None and later.forms is not None and self.forms.differ(later.forms):
            what = "outputs of layers, which the code between them may read on another stage"
        else:
            return
        raise RuntimeError(
            f"micro-batches of one shape led to different {what}. The step or a layer cuts or pads by the batch's "
            "content; pass `MegatronStrategy(variable_shapes=True)`."
        )


@dataclass
class StageRun:
    """State of one forward of one virtual stage, kept until its backward.

    Attributes:
        received: inputs of the stage, where its autograd graph begins.
        sent: outputs of the stage, still attached to the graph; empty on the last.
        output: what the user's step returned; last stage only.
        joint: messages of the forward whose backwards other ranks take part in, and what knows theirs.
    """

    micro_batch: int
    received: Boundary
    sent: Boundary
    output: Any = None
    joint: tuple[JointBackwards, list[Tensor]] | None = None

    def further_roots(self, nodes: Iterable[Any]) -> list[Tensor]:
        """Roots from which a backward of this run starts too, with gradients of zero, as those of other ranks come to
        what they stand for; collective over these ranks.

        Args:
            nodes: of the graph, where it starts.
        """
        if self.joint is None:
            return []
        (joint, noted), self.joint = self.joint, None
        return joint.further_roots(noted, nodes)


class _Arrival(torch.autograd.Function):
    """Identity, in place, that keeps the gradient which comes back through it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor, grads: dict[int, Tensor], place: int) -> Tensor:
        ctx.grads, ctx.place = grads, place
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        known = ctx.grads.get(ctx.place)
        ctx.grads[ctx.place] = grad if known is None else known + grad
        return None, None, None, None


def arrive(tensor: Tensor, grads: dict[int, Tensor], place: int) -> Tensor:
    """Let a received tensor be like any other inside a module: layers may write into it, as ``nn.ReLU(inplace=True)``
    does, which autograd forbids for leaves.

    Args:
        tensor: a leaf that wants a gradient.
        grads: takes the gradient, under ``place``.
        place: key in ``grads``.

    Returns:
        The same tensor, no leaf any more; or one on the same memory, where ``tensor`` is a view.
    """
    tensor = tensor.requires_grad_(False)
    if tensor._is_view():
        tensor = tensor.data
    anchor, version = torch.empty((), device=tensor.device, requires_grad=True), tensor._version
    arrived: Tensor = _Arrival.apply(tensor, anchor, grads, place)
    # Nothing was written: a part that is here too may have computed with what has become this tensor, and its graph
    # has kept the numbers of then.
    count_back(arrived, version)
    return arrived
