"""A model's shape read from the model itself, built on the meta device: no memory, no download, no guess by name.

The only part of the planner that needs torch, and it imports it when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_megatron.planner.model.shape import ModelShape

if TYPE_CHECKING:
    from torch import nn


def shape_from_module(build: Callable[[], Any] | Any, *, seq: int, heads: int | None = None) -> ModelShape:
    """Count a module's dimensions.

    The trunk is the longest list of layers with parameters; hidden, MLP and key/value sizes are read from the
    matrices of one layer, the vocabulary from the embedding.

    Args:
        build: a function that makes the module (called under the meta device), or a module.
        seq: sequence length in tokens.
        heads: attention heads; None asks the module (``config``, ``num_heads`` and the like) and else assumes heads of
            64 channels.

    Returns:
        A shape whose parameter count is that of the trunk's matrices, embedding and head.

    Raises:
        ValueError: no list of layers or no embedding was found, or a layer is not attention and one MLP.
    """
    import torch
    from torch import nn

    if isinstance(build, nn.Module):
        module = build
    else:
        with torch.device("meta"):
            module = build()
    configured = _from_configuration(module, seq)
    if configured is not None:
        return configured
    trunk = _trunk(module)
    embedding = _embedding(module)
    hidden = embedding.embedding_dim
    matrices = [tuple(p.shape) for p in trunk[0].parameters() if p.dim() == 2]
    found_heads = heads or _attribute(trunk[0], ("num_heads", "n_head", "n_heads", "num_attention_heads", "heads"))
    count = found_heads or max(1, hidden // 64)
    head_dim = _attribute(trunk[0], ("head_dim", "head_size")) or max(1, hidden // count)
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


def _positions(module: nn.Module, trunk: nn.Module, embedding: nn.Embedding) -> int:
    """Rows of the tables beside the embedding that are as wide and lie outside of the layers."""
    from torch import nn

    inside = {id(part) for part in trunk.modules()} | {id(embedding)}
    tables = [m for m in module.modules() if isinstance(m, nn.Embedding) and id(m) not in inside]
    return sum(m.num_embeddings for m in tables if m.embedding_dim == embedding.embedding_dim)


def _check_layer(shape: ModelShape, layer: nn.Module) -> None:
    """Refuse a layer whose parameters are not those of attention and one MLP: experts, or attention to an encoder."""
    counted, real = shape.layer_parameters, sum(parameter.numel() for parameter in layer.parameters())
    if not 0.75 < counted / real < 1.33:
        raise ValueError(
            f"a layer of {type(layer).__name__} has {real:,} parameters, but attention and one MLP of its sizes have "
            f"{counted:,}; give the sizes of a dense model of the same cost as a ModelShape"
        )


def _from_configuration(module: nn.Module, seq: int) -> ModelShape | None:
    """The shape from a Hugging Face configuration that the module or one of its children carries."""
    for child in module.modules():
        config = getattr(child, "config", None)
        if config is not None and hasattr(config, "to_dict"):
            return ModelShape.from_config(config.to_dict(), seq=seq)
    return None


def _trunk(module: nn.Module) -> nn.ModuleList | nn.Sequential:
    """The list of layers that holds the most parameters."""
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
    """The largest embedding."""
    from torch import nn

    found = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    if not found:
        raise ValueError(f"{type(module).__name__} has no nn.Embedding; give the shape by flags")
    return max(found, key=lambda m: m.num_embeddings)


def _split_matrices(matrices: list[tuple[int, ...]], hidden: int, width: int) -> tuple[int, list[int]]:
    """Elements of the attention's matrices, and the inner sizes of the MLP's.

    Matrices whose other side is larger than 3 x hidden, or that come in a pair with one of the same odd side, are the
    MLP's; a joint query, key and value matrix has at most three times the hidden size. All heads are ``width`` wide.
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
    """The first whole number that the module or a child carries under one of ``names``."""
    for child in module.modules():
        for name in names:
            value = getattr(child, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _tied(module: nn.Module, embedding: nn.Embedding) -> bool:
    """Whether no second matrix of the embedding's shape exists."""
    shape = embedding.weight.shape
    return sum(1 for p in module.parameters() if p.shape == shape) < 2
