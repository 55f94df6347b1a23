"""Kinds of modules, as far as splitting is concerned: linears, attention, Hugging Face models."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from lightning_megatron.layers.attention import ParallelMultiheadAttention
from lightning_megatron.layers.embedding import VocabParallelEmbedding
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.mesh.pickling import OtherClass
from lightning_megatron.parallelize.reading.replay import Replay

DROP_IN = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, ParallelMultiheadAttention)


def is_transposed(module: nn.Module) -> bool:
    """Whether this is GPT-2's ``Conv1D``: a linear whose weight is stored as [in, out]."""
    if getattr(module, "transposed", None) is True:
        return isinstance(module, (ColumnParallelLinear, RowParallelLinear))
    names = {cls.__name__ for cls in type(module).__mro__}
    return "Conv1D" in names and not isinstance(module, nn.Conv1d) and hasattr(module, "nf") and hasattr(module, "nx")


def is_linear(module: nn.Module) -> bool:
    """Whether this is a linear layer that holds its weight as a tensor: ``nn.Linear``, a subclass, or ``Conv1D``."""
    linear = isinstance(module, nn.Linear) or is_transposed(module)
    return linear and isinstance(module._parameters.get("weight"), torch.Tensor)


def linear_sizes(module: nn.Module) -> tuple[int, int]:
    """Input and output features of a linear layer."""
    if is_transposed(module):
        rows, columns = module.get_parameter("weight").shape
        return rows, columns
    assert isinstance(module, nn.Linear)
    return module.in_features, module.out_features


def is_table(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether this is an embedding that holds its table as a tensor, rather than computing it at each reading."""
    return isinstance(module, nn.Embedding) and "weight" in module._parameters


def is_attention(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Whether this is ``nn.MultiheadAttention``, which is split as one module; it holds its weights as tensors."""
    if not isinstance(module, nn.MultiheadAttention):
        return False
    return "in_proj_weight" in module._parameters and "weight" in module.out_proj._parameters


def is_hugging_face(module: nn.Module) -> bool:
    """Whether the module is a Hugging Face ``PreTrainedModel``."""
    return any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)


def hugging_face_models(module: nn.Module) -> dict[str, Any]:
    """The outermost Hugging Face models in a module, by dotted name (empty for the module itself)."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        if is_hugging_face(part) and name not in Parts(found):
            found[name] = part
    return found


def output_embeddings(module: nn.Module) -> list[nn.Module]:
    """The heads that the Hugging Face models in a module return as output embeddings."""
    heads = []
    for model in hugging_face_models(module).values():
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        if isinstance(head, nn.Module):
            heads.append(head)
    return heads


def local_class(module: nn.Module, base: type[nn.Module]) -> type[nn.Module]:
    """Class of the parallel twin: ``base``, or a subclass of it and of the module's class unless that is torch's."""
    classes: tuple[Any, Any] = type(module), base
    return cast("type[nn.Module]", _local_class(*classes))


@cache
def _local_class(cls: Any, base: Any) -> Any:
    if issubclass(cls, base):
        return cls
    plain = {nn.Linear, nn.Embedding, nn.MultiheadAttention, nn.modules.linear.NonDynamicallyQuantizableLinear}
    if cls in plain:
        return base
    bases = (OtherClass, *((cls, base) if _calls_super(cls, base) else (base, cls)))
    return type(f"{base.__name__}Of{cls.__name__}", bases, {"__module__": cls.__module__, "_twin_of": cls})


@contextlib.contextmanager
def as_written(module: nn.Module) -> Iterator[None]:
    """Give the module back its original class, for code that initialises by class (``Conv1D`` is not a linear)."""
    twin = type(module)
    module.__class__ = twin.__dict__.get("_twin_of", twin)
    try:
        yield
    finally:
        module.__class__ = twin


def _calls_super(cls: type[nn.Module], base: type[nn.Module]) -> bool:
    """Whether ``cls`` calls the product (or look-up) of its torch base class, which the twin then replaces."""
    torch_base = next((b for b in (nn.Linear, nn.Embedding, nn.MultiheadAttention) if issubclass(base, b)), nn.Module)
    if not issubclass(cls, torch_base):
        return False
    forward = cls.forward
    if forward is torch_base.forward:
        return True
    code = inspect.unwrap(forward).__code__
    return "super" in code.co_names


def behaves_like_linear(module: nn.Module) -> bool:
    """Whether the module computes ``x W^T + b`` for any values of its further parameters.

    If its class overrides ``forward``, a copy runs on a tiny input, with random values in the parameters other than
    weight and bias, because a low-rank update that is initialised to zero would not be noticed.
    """
    if type(module).forward in (nn.Linear.forward, ColumnParallelLinear.forward, RowParallelLinear.forward):
        return True
    weight, bias = module.get_parameter("weight"), getattr(module, "bias", None)
    if weight.is_meta:
        return True
    with torch.no_grad():
        x = torch.linspace(-1, 1, linear_sizes(module)[0], dtype=weight.dtype, device=weight.device).expand(2, 1, -1)
        want = F.linear(x, weight.t() if is_transposed(module) else weight, bias)
        try:
            _, got = Replay(module, (x,), {}).run(_randomise_further_parameters)
        except Exception:  # an overridden forward may need other arguments, such as a number of groups
            return False
    return isinstance(got, torch.Tensor) and got.shape == want.shape and torch.allclose(got, want, rtol=1e-2, atol=1e-3)


def looks_up_rows(module: nn.Embedding) -> bool:
    """Whether what an embedding gives for a token depends on that token's row of the table alone.

    If its class overrides ``forward``, copies run with and without changes in the rows of other tokens: a norm over the
    whole table can be part of it.
    """
    if type(module).forward in (nn.Embedding.forward, VocabParallelEmbedding.forward) or module.weight.is_meta:
        return True
    tokens = torch.arange(min(2, module.num_embeddings), device=module.weight.device)[None]
    with torch.no_grad():
        try:
            outputs = [Replay(module, (tokens,), {}).run(prepare)[1] for prepare in (_nothing, _change_other_rows)]
        except Exception:  # it may need other arguments
            return False
    same = [torch.equal(one, other) for one, other in zip(*map(pytree.tree_leaves, outputs), strict=True)]
    return all(same)


def _nothing(module: nn.Module) -> None:
    """The module as it is."""


def _change_other_rows(module: nn.Module) -> None:
    module.get_parameter("weight").data[2:].mul_(-1.5).add_(0.25)


def _randomise_further_parameters(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    for name, parameter in module.named_parameters():
        if name not in ("weight", "bias") and parameter.is_floating_point():
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter)
