"""The output of the last layer, where the code after the layers runs by itself.

Layers run on micro-batches, and what is after them on the whole batch. So the step ends after the last layer, and the
step on the batch, whose layers give stand-ins, is handed what they gave, joined::

    micro-batch 0   ... last layer ──▶ (x [2, 8], None)   taken: x ─┐
    micro-batch 1   ... last layer ──▶ (x [2, 8], None)   taken: x ─┴─▶ joined [4, 8]
    batch           ... last layer ──▶ (0 [4, 8], None)   given: (joined, None) ──▶ the head, the loss
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_megatron.pipeline.elsewhere.away import refuse_away
from lightning_megatron.pipeline.stage.boundary import Boundary, Leaf, Span
from lightning_megatron.pipeline.stage.forms import Form, shapes_of


def refuse_left_behind() -> NoReturn:
    """Refuse layers, or parts before them, that have side effects."""
    raise RuntimeError(
        "layers leave something behind besides their outputs in `training_step` that they did not leave when it was "
        "tried; it would be that of one micro-batch. Let them leave it in every forward, or set `micro_batch_size` to "
        "the batch size."
    )


def taken(output: Any, layer: str, *, leaves: bool) -> Boundary:
    """The tensors in the last layer's output for a micro-batch.

    Args:
        output: of the layer.
        layer: its name.
        leaves: whether layers leave something behind besides their outputs.

    Raises:
        RuntimeError: they do, or there is no tensor.
    """
    if leaves:
        refuse_left_behind()
    refuse_away(output, f"the output of layer `{layer}`")
    places = [(at, leaf) for at, leaf in enumerate(pytree.tree_leaves(output)) if isinstance(leaf, Tensor)]
    if not places:
        raise RuntimeError(f"layer `{layer}` returned {type(output).__name__}, which holds no tensor.")
    told = tuple(Leaf(at, tuple(t.shape), t.dtype, t.requires_grad) for at, t in places)
    return Boundary(told, [tensor for _, tensor in places])


@dataclass
class JoinedBoundary(Boundary):
    """Outputs of the last layer for all micro-batches of a batch.

    Attributes:
        parts: by micro-batch.
        spans: their samples.
        wants: whether gradients will be asked for.
    """

    parts: list[Boundary] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    wants: bool = False

    def join(self, place: int, like: Tensor) -> Tensor:
        """The tensor of the whole batch.

        Args:
            place: of the tensor.
            like: what stands for it; tells by its shape along which dimension the samples lie.

        Raises:
            RuntimeError: it does not tell.
        """
        pieces, whole = [part.tensors[place] for part in self.parts], tuple(like.shape)
        dims = {span.dim_of(whole, tuple(piece.shape)) for span, piece in zip(self.spans, pieces, strict=True)}
        if len(dims) > 1 or (None in dims and len(pieces) > 1):
            raise RuntimeError(
                f"the last layer gives a tensor of shape {whole} for a whole batch and for each of its micro-batches; "
                "it is not known what it would be for the batch. Set `micro_batch_size` to the batch size."
            )
        dim = dims.pop() or 0
        tensor, leaf = torch.cat(pieces, dim), self.parts[0].leaves[place]
        wants = self.wants and leaf.requires_grad
        self.dims[place] = dim
        self.leaves = (*self.leaves, Leaf(leaf.index, whole, leaf.dtype, wants))
        self.tensors.append(tensor.requires_grad_(wants))
        return self.arrive(place)

    def agrees(self, layer: Any, form: Form | None) -> bool:
        """Whether a layer's output for the whole batch has the form of those for micro-batches, but for the samples.

        Args:
            layer: its number, or the name of a call inside of it.
            form: of what stands for its output.
        """
        if form is None:
            return True
        for span, part in zip(self.spans, self.parts, strict=True):
            told = None if part.forms is None else part.forms.layers.get(layer)
            if told is not None and not _are_alike(span, shapes_of(form), shapes_of(told)):
                return False
        return True

    def parts_of_gradients(self) -> Iterator[list[Tensor | None]]:
        """The gradients of what each micro-batch gave; ``None`` where the loss does not depend on it."""
        dims = [self.dims[place] for place, leaf in enumerate(self.leaves) if leaf.requires_grad]
        found = list(zip(self.gradients(), dims, strict=True))
        for span in self.spans:
            yield [None if grad is None else _rows_of(grad, dim, span) for grad, dim in found]


def _rows_of(whole: Tensor, dim: int, span: Span) -> Tensor:
    start, stop = (whole.shape[dim] * at // span.total for at in (span.start, span.stop))
    return whole.narrow(dim, start, stop - start).contiguous()


def _are_alike(span: Span, whole: list[tuple[int, ...]], part: list[tuple[int, ...]]) -> bool:
    try:
        for one, other in zip(whole, part, strict=True):
            span.dim_of(one, other)
    except (RuntimeError, ValueError):
        return False
    return True


def given(output: Any, joined: JoinedBoundary, layer: str) -> Any:
    """Output of the last layer for the whole batch.

    Args:
        output: stand-in for it.
        joined: what it gave for the micro-batches.
        layer: name of the layer.

    Raises:
        RuntimeError: it gives other tensors than it would give for the batch.
    """
    leaves, spec = pytree.tree_flatten(output)
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if any(places != [leaf.index for leaf in part.leaves] for part in joined.parts):
        raise RuntimeError(
            f"layer `{layer}` gives other tensors for micro-batches than for the whole batch; set `micro_batch_size` "
            "to the batch size."
        )
    for place, at in enumerate(places):
        leaves[at] = joined.join(place, leaves[at])
    return pytree.tree_unflatten(leaves, spec)
