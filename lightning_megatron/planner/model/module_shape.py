"""Reads a model's shape from the module itself, built on the meta device without memory or downloads.

Only this part of the planner needs torch, which it imports when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lightning_megatron.planner.model.counted_mixtures import mixture_fields, trunk_of_mixtures
from lightning_megatron.planner.model.shape import ModelShape

if TYPE_CHECKING:
    from torch import nn


_HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "heads")
_HEAD_SIZES = ("head_dim", "head_size", "per_head")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")


def shape_from_module(
    build: Callable[[], Any] | Any, *, seq: int, heads: int | None = None, experts: Mapping[str, int] | None = None
) -> ModelShape:
    """Read the dimensions of a module.

    A Hugging Face configuration on the module, or on one of its children, decides if there is one. Otherwise the trunk
    is the list of layers with the most parameters; hidden, MLP and key/value sizes are read from the matrices of its
    first layer, and the vocabulary from the largest embedding.

    Args:
        build: a function that makes the module (called under the meta device), or a module.
        seq: sequence length in tokens.
        heads: attention heads; None reads them from attributes of the layer (``num_heads`` and the like), and else
            assumes heads of 64 channels.
        experts: name of each module of experts -> how many it has. With some, models whose configuration is not known
            are counted, too.

    Raises:
        ValueError: the module has no list of layers or no embedding, or a layer is not attention and one MLP, or a
            mixture of the experts that are named.
    """
    import torch
    from torch import nn

    if isinstance(build, nn.Module):
        module = build
    else:
        with torch.device("meta"):
            module = build()
    configured = _from_configuration(module, seq, counts=bool(experts))
    if configured is not None:
        return configured
    if experts and (name := trunk_of_mixtures(module, experts)):
        return _with_mixtures(module, name, experts, seq, heads)
    trunk = _trunk(module)
    embedding = _embedding(module)
    hidden = embedding.embedding_dim
    matrices = [tuple(p.shape) for p in trunk[0].parameters() if p.dim() == 2]
    found_heads = heads or _attribute(trunk[0], _HEADS)
    count = found_heads or max(1, hidden // 64)
    head_dim = _attribute(trunk[0], _HEAD_SIZES[:2]) or max(1, hidden // count)
    attention, mlp = _split_matrices(matrices, hidden, head_dim * count)
    key_values = max(0, attention - 2 * hidden * head_dim * count) // (2 * hidden)
    kv_heads = max(1, min(count, key_values // head_dim))
    shape = ModelShape(
        layers=len(trunk),
        hidden=hidden,
        heads=count,
        vocab=embedding.num_embeddings,
        seq=seq,
        kv_heads=kv_heads if count % kv_heads == 0 else count,
        ffn=sum(mlp) // len(mlp) if mlp else 4 * hidden,
        gated=len(mlp) >= 3,
        tied=_tied(module, embedding),
        head_dim=head_dim if head_dim * count != hidden else None,
        positions=_positions(module, trunk, embedding),
    )
    _check_layer(shape, trunk[0])
    return shape


def _with_mixtures(
    module: nn.Module, trunk: str, experts: Mapping[str, int], seq: int, heads: int | None
) -> ModelShape:
    """The shape of a model with mixtures of experts in the layers of the list ``trunk``."""
    embedding, layers = _embedding(module), module.get_submodule(trunk)
    hidden = embedding.embedding_dim

    def asked(names: tuple[str, ...]) -> int | None:
        return _attribute(layers, names) or next(
            filter(None, (_own(each, names) for each in _configurations(module))), None
        )

    count = heads or asked(_HEADS) or max(1, hidden // 64)
    head_dim, key_values = asked(_HEAD_SIZES) or max(1, hidden // count), asked(_KEY_VALUE_HEADS) or count
    shape = ModelShape(
        **mixture_fields(module, trunk, experts, hidden, asked),
        hidden=hidden,
        heads=count,
        vocab=embedding.num_embeddings,
        seq=seq,
        kv_heads=key_values if count % key_values == 0 else count,
        tied=_tied(module, embedding),
        head_dim=head_dim if head_dim * count != hidden else None,
        positions=_positions(module, layers, embedding),
    )
    counted, real = shape.parameters, sum(parameter.numel() for parameter in module.parameters())
    width = shape.heads * shape.head_size
    if not 0.75 < counted / real < 1.33 or shape.attention_matrix_parameters < 2 * hidden * width:
        raise ValueError(
            f"the layers of `{trunk}` are not all attention of {count} heads and an MLP or a mixture of experts: "
            f"counted as such the model has {counted:,} parameters, of {real:,}; give the sizes as a ModelShape"
        )
    return shape


def _configurations(module: nn.Module) -> Iterator[Any]:
    """The configurations that the module and its children have, the outermost first."""
    for child in module.modules():
        if (config := getattr(child, "config", None)) is not None:
            yield config


def _positions(module: nn.Module, trunk: nn.Module, embedding: nn.Embedding) -> int:
    """Total rows of position tables: other embeddings outside of the trunk that are as wide as the token embedding."""
    from torch import nn

    inside = {id(part) for part in trunk.modules()} | {id(embedding)}
    tables = [m for m in module.modules() if isinstance(m, nn.Embedding) and id(m) not in inside]
    return sum(m.num_embeddings for m in tables if m.embedding_dim == embedding.embedding_dim)


def _check_layer(shape: ModelShape, layer: nn.Module) -> None:
    """Refuse a layer that is not attention and one MLP, such as one with experts or attention to an encoder.

    Raises:
        ValueError: its parameter count differs by a third or more from that of ``shape``.
    """
    counted, real = shape.layer_parameters, sum(parameter.numel() for parameter in layer.parameters())
    if not 0.75 < counted / real < 1.33:
        raise ValueError(
            f"a layer of {type(layer).__name__} has {real:,} parameters, but attention and one MLP of its sizes have "
            f"{counted:,}; give the sizes of a dense model of the same cost as a ModelShape"
        )


def _from_configuration(module: nn.Module, seq: int, *, counts: bool) -> ModelShape | None:
    """The shape from a Hugging Face configuration of the module or one of its children; None without one, or, where
    the module can be counted (``counts``), without one of a known kind.
    """
    for config in _configurations(module):
        if hasattr(config, "to_dict"):
            try:
                return ModelShape.from_config(config.to_dict(), seq=seq)
            except ValueError:
                if not counts or getattr(config, "is_encoder_decoder", False):
                    raise
                return None
    return None


def _trunk(module: nn.Module) -> nn.ModuleList | nn.Sequential:
    """The list of layers of one class with the most parameters."""
    from torch import nn

    lists = [m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1]
    sized = [(sum(p.numel() for p in m.parameters()), m) for m in lists if _alike(m)]
    if not sized:
        raise ValueError(
            f"{type(module).__name__} has no nn.ModuleList or nn.Sequential of equal layers; give the shape by flags"
        )
    return max(sized, key=lambda pair: pair[0])[1]


def _alike(layers: nn.ModuleList | nn.Sequential) -> bool:
    """Whether all layers are of one class and have parameters."""
    return len({type(layer) for layer in layers}) == 1 and any(True for _ in layers[0].parameters())


def _embedding(module: nn.Module) -> nn.Embedding:
    """The embedding with the most rows."""
    from torch import nn

    found = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    if not found:
        raise ValueError(f"{type(module).__name__} has no nn.Embedding; give the shape by flags")
    return max(found, key=lambda m: m.num_embeddings)


def _split_matrices(matrices: list[tuple[int, ...]], hidden: int, width: int) -> tuple[int, list[int]]:
    """Total elements of the attention's matrices, and the inner sizes of the MLP's matrices.

    A matrix belongs to the MLP if its other dim is larger than 3 x hidden, or larger than hidden with a transposed
    partner; a joint query, key and value matrix has at most 3 x hidden rows.

    Args:
        matrices: shapes of the matrices of one layer.
        hidden: hidden size.
        width: total size of all heads; such matrices belong to the attention.
    """
    attention, mlp = 0, []
    for rows, columns in matrices:
        other = columns if rows == hidden else rows
        partners = sum(1 for shape in matrices if shape == (columns, rows)) if rows != columns else 0
        if other != width and (other > 3 * hidden or (partners and other > hidden)):
            mlp.append(other)
        else:
            attention += rows * columns
    return attention, mlp


def _attribute(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """The first integer attribute of the module or a child with one of ``names``; None without one."""
    return next(filter(None, (_own(child, names) for child in module.modules())), None)


def _own(thing: Any, names: tuple[str, ...]) -> int | None:
    """The first integer attribute of ``thing`` with one of ``names``; None without one."""
    for name in names:
        value = getattr(thing, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _tied(module: nn.Module, embedding: nn.Embedding) -> bool:
    """Whether the head is tied to the embedding: no second parameter has the embedding's shape."""
    shape = embedding.weight.shape
    return sum(1 for p in module.parameters() if p.shape == shape) < 2
