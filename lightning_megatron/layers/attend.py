"""The attention of this rank's heads, for a whole `torch.nn.MultiheadAttention` and for one split over heads.

    inputs ──projections──▶ local heads ──scores, dropout, values──▶ output projection ──sum over the group──▶ output

The projections are linears without a module of their own, so a split backward may compute their weight gradients later,
separately for each part of the packed weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.layers.multiply.products import (
    PendingProducts,
    PutOff,
    add_bias,
    row_product,
    sharded_product,
    share_input,
)
from lightning_megatron.layers.multiply.weight_view import WHOLE, Operand, autocast_input
from lightning_megatron.layers.streams import RankStream
from lightning_megatron.layers.whole import SplitDim, WholeTensor
from lightning_megatron.mesh.messages.collectives import gather_from_group, reduce_from_group
from lightning_megatron.mesh.parts.boxes import Range
from lightning_megatron.mesh.pickling import OfOneRank

PutOffProjection = Callable[[str, Range | None, Tensor, Tensor], None]
"""Takes the name of a projection (``in_proj``, ``q_proj``, .., ``out_proj``), its rows of the packed weight and bias
(None: all rows), and the factors ``(grad, x)`` of its weight gradient; a split backward multiplies them later."""


@dataclass(frozen=True, eq=False)
class AttentionSharding(OfOneRank):
    """How a split attention runs.

    Attributes:
        group: the tensor group.
        heads: this rank's query heads.
        key_value: the key/value heads that these query heads read, in order.
        rows: rows of the packed projection that this rank computes where the parameter itself stays whole, else None.
        sequence_dim: dim along which inputs and output are split (sequence parallelism), or None.
        stream: dropout stream of the local heads.
    """

    group: dist.ProcessGroup
    heads: Range
    key_value: tuple[int, ...]
    rows: tuple[Range, ...] | None
    sequence_dim: int | None
    stream: RankStream


def key_value_total(layer: nn.MultiheadAttention) -> int:
    """Number of key/value heads, over all ranks."""
    total: int = getattr(layer, "num_key_value_heads", layer.num_heads)
    return total


def attend_heads(
    layer: nn.MultiheadAttention,
    inputs: tuple[Tensor, Tensor, Tensor],
    masks: tuple[Tensor | None, Tensor | None, bool],
    need_weights: bool,
    average: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attention of the local heads (of all heads if the layer is not split), from whole inputs to a whole output.

    As in torch, ``is_causal`` replaces the mask that it describes if neither weights nor padding are given.

    Args:
        layer: any `torch.nn.MultiheadAttention`.
        inputs: query, key and value, [batch, seq, embed_dim] with ``batch_first``.
        masks: ``key_padding_mask``, ``attn_mask`` and ``is_causal``.
        need_weights: whether to return the attention weights.
        average: whether to average the weights over the heads.

    Returns:
        Output of the shape of the query, and the weights of all heads or None.

    Raises:
        ValueError: ``is_causal`` without ``attn_mask``.
    """
    sharding = _sharding_of(layer)
    unbatched = inputs[0].dim() == 2
    if unbatched:
        first = inputs[0].unsqueeze(0 if layer.batch_first else 1)
        inputs = tuple(first if x is inputs[0] else x.unsqueeze(0 if layer.batch_first else 1) for x in inputs)  # type: ignore[assignment]
        masks = (None if masks[0] is None else masks[0].unsqueeze(0), masks[1], masks[2])
    projected = _project(layer, inputs)
    if not layer.batch_first:
        projected = [x.transpose(0, 1) for x in projected]
    query, key, value = (x.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for x in projected)
    key, value, extra = _extra_positions(layer, key, value)
    causal = masks[2] and masks[0] is None and masks[1] is not None and not need_weights
    mask = None if causal else _merged_mask(layer, masks, query, extra)
    if sharding is not None and layer.training and layer.dropout > 0:
        sharding.stream.open(query.device, (query.shape[0], query.shape[2]))
    dropout = layer.dropout if layer.training else 0.0
    out, weights = _attend(query, key, value, mask, causal, dropout, need_weights)
    if sharding is not None:
        sharding.stream.close()
    out = out.transpose(1, 2).flatten(2)
    out = _output(layer, out if layer.batch_first else out.transpose(0, 1))
    if weights is not None:
        weights = _shown_weights(layer, weights, average)
    if unbatched:
        out = out.squeeze(0 if layer.batch_first else 1)
        weights = None if weights is None else weights.squeeze(0)
    return out, weights


def _sharding_of(layer: nn.MultiheadAttention) -> AttentionSharding | None:
    found: AttentionSharding | None = getattr(layer, "_sharding", None)
    return found


def _project(layer: nn.MultiheadAttention, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Query, key and value of the local heads, [.., heads * head_dim] each; inputs that are one tensor are shared."""
    query, key, value = inputs
    if any(isinstance(x, WholeTensor) and x.is_by_rows for x in inputs):  # rows are multiplied where they are
        rows = [x.local() if isinstance(x, WholeTensor) and x.is_by_rows else x for x in inputs]
        found = zip(inputs, rows, _project(layer, rows), strict=True)
        return [part if x is own else x.like(part, split=_brought(layer, x)) for x, own, part in found]  # type: ignore[attr-defined, arg-type]
    whole = _sharding_of(layer) is None
    if whole and layer._qkv_same_embed_dim and query is key and key is value:
        return list(_packed_projection(layer, query).split(_projection_sizes(layer), -1))
    weights, parts = _projections(layer)
    takers = _takers(layer, inputs)
    weights = [weight if taker is None else weight.detach() for weight, taker in zip(weights, takers, strict=True)]
    bias = layer.in_proj_bias
    biases = [bias if bias is None or taker is None else bias.detach() for taker in takers]
    operands = [WHOLE] * 3 if not layer._qkv_same_embed_dim else parts
    sharding = _sharding_of(layer)
    if sharding is None:
        local = [operand.of(weight) for operand, weight in zip(operands, weights, strict=True)]
        added = [None if bias is None else part.of(bias) for part, bias in zip(parts, biases, strict=True)]
        return [_linear(*factors) for factors in zip(inputs, local, added, takers, strict=True)]
    outputs: dict[int, Tensor] = {}
    for source in {id(x): x for x in inputs}.values():
        members = [i for i, x in enumerate(inputs) if x is source]
        pending = PendingProducts(len(members))
        used = [(weights[i], operands[i]) for i in members]
        shared, *passed = share_input(autocast_input(source), used, pending, sharding.group, sharding.sequence_dim)
        for place, i in enumerate(members):
            put_off, part = takers[i], parts[i]
            outputs[i] = sharded_product(shared, passed[place], biases[i], pending, place, put_off, part=part)
    return [outputs[i] for i in range(3)]


def _brought(layer: nn.MultiheadAttention, x: WholeTensor) -> SplitDim | None:
    """How the tokens of a projection of ``x`` are split where that gathers them; ``None`` for as those of ``x``."""
    sharding = _sharding_of(layer)
    return None if sharding is None or sharding.sequence_dim is None else x.spread.together()


def _packed_projection(layer: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """Query, key and value of one tensor in one product. x: [.., embed_dim] -> [.., features of all three]."""
    weight, bias = layer.in_proj_weight, layer.in_proj_bias
    taker = _taker(layer, "in_proj", None, x)
    if taker is not None:
        weight, bias = weight.detach(), None if bias is None else bias.detach()  # type: ignore[assignment]
    return _linear(x, weight, bias, taker)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, taker: PutOff | None) -> Tensor:
    """A linear of a layer that is not split; with ``taker``, weight and bias are detached."""
    if taker is None:
        return F.linear(x, weight, bias)
    bias = None if bias is None else autocast_input(bias)
    return sharded_product(autocast_input(x), autocast_input(weight), bias, PendingProducts(1), 0, taker)


def _takers(layer: nn.MultiheadAttention, inputs: Sequence[Tensor]) -> list[PutOff | None]:
    """For query, key and value: the function that takes the factors of the weight gradient, or None for autograd."""
    sharding = _sharding_of(layer)
    if sharding is not None and sharding.rows is not None:
        return [None] * 3
    names = ["in_proj"] * 3 if layer._qkv_same_embed_dim else ["q_proj", "k_proj", "v_proj"]
    sizes = _projection_sizes(layer)
    stops = [sum(sizes[: i + 1]) for i in range(3)]
    rows = [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    return [_taker(layer, name, part, x) for name, part, x in zip(names, rows, inputs, strict=True)]


def _taker(layer: nn.MultiheadAttention, name: str, rows: Range | None, x: Tensor) -> PutOff | None:
    put_off: PutOffProjection | None = getattr(layer, "put_off", None)
    weight = layer.out_proj.weight if name == "out_proj" else getattr(layer, f"{name}_weight")
    if put_off is None or not (torch.is_grad_enabled() and x.requires_grad and weight.requires_grad):
        return None
    return None if weight._backward_hooks else partial(put_off, name, rows)


def _projection_sizes(layer: nn.MultiheadAttention) -> list[int]:
    """Output features of the local query, key and value."""
    sharding, size = _sharding_of(layer), layer.head_dim
    heads = layer.num_heads if sharding is None else sharding.heads[1] - sharding.heads[0]
    read = key_value_total(layer) if sharding is None else len(sharding.key_value)
    return [heads * size, read * size, read * size]


def _projections(layer: nn.MultiheadAttention) -> tuple[list[Tensor], list[Operand]]:
    """Parameters with the weights of query, key and value, and the rows of the local heads in a packed one.

    The rows of the packed bias are the same, also where each weight is a separate parameter.
    """
    sharding, sizes = _sharding_of(layer), _projection_sizes(layer)
    rows = None if sharding is None else sharding.rows
    parts = [Operand(part) for part in _split_ranges(rows or ((0, sum(sizes)),), sizes)]
    if layer._qkv_same_embed_dim:
        return [layer.in_proj_weight] * 3, parts
    return [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight], parts


def _split_ranges(ranges: Sequence[Range], sizes: Sequence[int]) -> list[tuple[Range, ...]]:
    """Divide the concatenated ``ranges`` into consecutive parts of ``sizes``."""
    left, parts = list(ranges), []
    for size in sizes:
        part: list[Range] = []
        while size > 0:
            start, stop = left.pop(0)
            end = min(stop, start + size)
            part.append((start, end))
            size -= end - start
            if end < stop:
                left.insert(0, (end, stop))
        parts.append(tuple(part))
    return parts


def _extra_positions(layer: nn.MultiheadAttention, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, int]:
    """Append one position each for ``add_bias_kv`` and ``add_zero_attn``. key: [batch, heads, seq, head_dim].

    Returns:
        Key, value and the number of positions appended.
    """
    extra = 0
    shape = (key.shape[0], key.shape[1], 1, layer.head_dim)
    if layer.bias_k is not None and layer.bias_v is not None:
        key = torch.cat([key, layer.bias_k.view(1, -1, 1, layer.head_dim).expand(shape)], dim=2)
        value = torch.cat([value, layer.bias_v.view(1, -1, 1, layer.head_dim).expand(shape)], dim=2)
        extra += 1
    if layer.add_zero_attn:
        key = torch.cat([key, key.new_zeros(shape)], dim=2)
        value = torch.cat([value, value.new_zeros(shape)], dim=2)
        extra += 1
    return key, value, extra


def _merged_mask(
    layer: nn.MultiheadAttention,
    masks: tuple[Tensor | None, Tensor | None, bool],
    query: Tensor,
    extra: int,
) -> Tensor | None:
    """Additive mask [batch or 1, local heads or 1, queries, keys], or None."""
    padding, attention, is_causal = masks
    if is_causal and attention is None:
        raise ValueError("`is_causal=True` is a hint about `attn_mask`, as in torch: pass the mask as well.")
    total: Tensor | None = None
    for mask in (attention, padding):
        if mask is None:
            continue
        added = (
            torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask, -math.inf)
            if mask.dtype == torch.bool
            else mask
        )
        if mask is padding:
            added = added[:, None, None, :]
        elif added.dim() == 3:
            added = added.view(query.shape[0], -1, *added.shape[1:])
            sharding = _sharding_of(layer)
            if sharding is not None:
                added = added[:, slice(*sharding.heads)]
        added = F.pad(added, (0, extra))
        total = added if total is None else total + added
    return total


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: float, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """query: [batch, heads, seq, head_dim], key and value with the same or fewer heads -> same as query."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if not need_weights:
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, causal), None
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    weights = F.dropout(weights, dropout) if dropout > 0 else weights
    return weights @ value, weights


def _output(layer: nn.MultiheadAttention, out: Tensor) -> Tensor:
    if isinstance(out, WholeTensor) and out.is_by_rows:
        sharding = _sharding_of(layer)
        scatters = sharding is not None and sharding.sequence_dim is not None
        return out.like(_output(layer, out.local()), split=out.spread.in_blocks(sharding.group) if scatters else None)  # type: ignore[union-attr]
    sharding, weight, bias = _sharding_of(layer), layer.out_proj.weight, layer.out_proj.bias
    taker = _taker(layer, "out_proj", None, out)
    if sharding is None:
        detached = bias if bias is None or taker is None else bias.detach()
        return _linear(out, weight if taker is None else weight.detach(), detached, taker)
    weight = weight if taker is None else weight.detach()
    return add_bias(row_product(autocast_input(out), weight, sharding.group, sharding.sequence_dim, taker), bias)


def _shown_weights(layer: nn.MultiheadAttention, weights: Tensor, average: bool) -> Tensor:
    """Attention weights as torch returns them: averaged over all heads, or all heads [batch, heads, L, S]."""
    sharding = _sharding_of(layer)
    if isinstance(weights, WholeTensor) and weights.along != 1:  # tokens are split: each rank shows its queries'
        return weights.like(_shown_weights(layer, weights.local(), average), weights.along - average)
    if average:
        mean = weights.sum(1) / layer.num_heads
        return mean if sharding is None else reduce_from_group(mean, sharding.group)
    return weights if sharding is None else gather_from_group(weights, 1, sharding.group)
