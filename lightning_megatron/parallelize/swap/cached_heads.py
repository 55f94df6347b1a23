"""Key-value caches that hold keys and values of all heads before a layer with split heads is called: prefix tuning.

A rank takes the heads that its query heads read, as its projections do; the gradients of the ranks are summed, so that
each has that of the whole prefix::

    prefix of a layer [batch, 4 heads, tokens, size]     rank 0 reads heads 0 1     rank 1 reads heads 2 3
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.mesh.key_value_caches import is_cache
from lightning_megatron.mesh.messages.collectives import copy_to_group
from lightning_megatron.mesh.pickling import RankHook
from lightning_megatron.parallelize.reading.heads import HeadSizes


def cutting_hook(sizes: HeadSizes, group: dist.ProcessGroup) -> Callable[..., None]:
    """A hook that cuts what a cache holds for an attention before its first call to the heads of this rank.

    Args:
        sizes: of the whole attention.
        group: its tensor-parallel ranks.
    """
    cut: weakref.WeakSet[Any] = weakref.WeakSet()
    heads = sizes.read_by(group.size(), group.rank())

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        at = getattr(module, "layer_idx", None)
        for cache in (*args, *kwargs.values()):
            layers = getattr(cache, "layers", None)
            if layers is None or not is_cache(cache):  # in this order: nothing is asked of tensors in compiled code
                continue
            if not isinstance(at, int) or at >= len(layers) or layers[at] in cut:
                continue
            layer = layers[at]
            if all(_is_whole(getattr(layer, name, None), sizes) for name in ("keys", "values")):
                layer.keys, layer.values = (_cut(tensor, heads, group) for tensor in (layer.keys, layer.values))
            cut.add(layer)

    return RankHook(hook)


def _is_whole(tensor: Any, sizes: HeadSizes) -> bool:
    return isinstance(tensor, Tensor) and tensor.ndim == 4 and tensor.shape[1] == sizes.key_value and tensor.numel() > 0


def _cut(tensor: Tensor, heads: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    if tensor.requires_grad:
        tensor = copy_to_group(tensor, group)
    return tensor.index_select(1, torch.tensor(heads, device=tensor.device))
