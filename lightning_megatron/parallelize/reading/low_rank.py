"""Linear layers with low-rank updates beside them (LoRA, Hu et al., arXiv 2106.09685), split as one layer.

``y = W x + s B A x`` is linear in ``x``, with ``A`` [r, in] and ``B`` [out, r]. If the output is split, ``W`` and ``B``
keep this rank's rows and ``A`` stays whole. If the input is split, ``W`` and ``A`` keep this rank's columns, each
followed by a sum over the group, and ``B`` stays whole. Such a module is recognised by what it computes, not by its
name or library: its parameters belong to one linear layer and to pairs of smaller ones, and slices of it compute slices
of its output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_megatron.mesh.parts.boxes import Range
from lightning_megatron.parallelize.reading.copy import copy_of
from lightning_megatron.parallelize.reading.divisible import divisible
from lightning_megatron.parallelize.reading.kinds import behaves_like_linear, is_linear, is_transposed, linear_sizes
from lightning_megatron.parallelize.reading.replay import Prepare, Replay


@dataclass(frozen=True)
class LowRank:
    """Names of the layers inside a linear layer with low-rank updates, relative to it.

    Attributes:
        base: the linear layer that is updated.
        downs: per update, the layer from the input to the low rank (``A``).
        ups: per update, the layer from the low rank to the output (``B``).
    """

    base: str
    downs: tuple[str, ...]
    ups: tuple[str, ...]


_verified: WeakKeyDictionary[nn.Module, tuple[LowRank, bool]] = WeakKeyDictionary()


def structure_of(module: nn.Module) -> LowRank | None:
    """The layers of a module whose parameters belong to one linear layer and to low-rank pairs; else None."""
    if is_linear(module):
        return None
    linears = {name: part for name, part in module.named_modules() if is_linear(part)}
    if len(linears) < 3 or len(linears) % 2 == 0:
        return None
    if {id(p) for p in module.parameters()} - {id(p) for part in linears.values() for p in part.parameters()}:
        return None
    sizes = {name: linear_sizes(part) for name, part in linears.items()}
    base = max(sizes, key=lambda name: sizes[name][0] * sizes[name][1])
    (wide_in, wide_out), others = sizes[base], [name for name in sizes if name != base]
    downs = [name for name in others if sizes[name][0] == wide_in and sizes[name][1] < min(wide_in, wide_out)]
    ups = [name for name in others if name not in downs and sizes[name][1] == wide_out]
    if len(downs) != len(ups) or [sizes[n][1] for n in downs] != [sizes[n][0] for n in ups]:
        return None
    return LowRank(base, tuple(downs), tuple(ups))


def low_rank(module: nn.Module) -> LowRank | None:
    """The layers of a linear layer with low-rank updates, verified by a trial on a copy; None for other modules."""
    found = structure_of(module)
    if found is None:
        return None
    if any(parameter.is_meta for parameter in module.parameters()):
        return found
    known = _verified.get(module)
    if known is None or known[0] != found:
        known = _verified[module] = found, _adds_up(module, found)
    return found if known[1] else None


def is_splittable(module: nn.Module) -> bool:
    """Whether this is a linear layer, with or without low-rank updates, or is cut like one."""
    return is_linear(module) or is_one_product(module)


def is_one_product(module: nn.Module) -> bool:
    """Whether several tensors or layers together are split like one linear layer."""
    return low_rank(module) is not None or divisible(module) is not None


def splits_like_linear(module: nn.Module) -> bool:
    """Whether the module computes what a linear layer does, with or without low-rank updates."""
    return behaves_like_linear(module) if is_linear(module) else is_one_product(module)


def sizes_of(module: nn.Module) -> tuple[int, int]:
    """Input and output features of a linear layer, with or without low-rank updates, or of what is cut like one."""
    cut = None if is_linear(module) else divisible(module)
    return linear_sizes(base_of(module)) if cut is None else cut.sizes


def base_of(module: nn.Module) -> nn.Module:
    """The linear layer itself, or the one to which low-rank updates are added."""
    found = structure_of(module)
    return module if found is None else module.get_submodule(found.base)


def linears_of(module: nn.Module) -> Iterator[nn.Module]:
    """The linear layers of such a module: itself, or its base and those of its updates."""
    found = structure_of(module)
    for name in ("",) if found is None else (found.base, *found.downs, *found.ups):
        yield module.get_submodule(name)


def keep_outputs(module: nn.Module, ranges: Sequence[Range]) -> None:
    """Reduce a layer, with or without low-rank updates, to ranges of its output features, in place."""
    found = structure_of(module)
    for name in ("",) if found is None else (found.base, *found.ups):
        layer = module.get_submodule(name)
        for key, parameter in layer.named_parameters(recurse=False):
            dim = 1 if is_transposed(layer) and key == "weight" else 0
            parameter.data = take(parameter.data, dim, ranges)
        if is_transposed(layer):
            layer.nf = sum(stop - start for start, stop in ranges)  # type: ignore[assignment]


def take(tensor: Tensor, dim: int, ranges: Sequence[Range]) -> Tensor:
    """These ranges of a tensor along ``dim``, concatenated."""
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in ranges], dim)


def _adds_up(module: nn.Module, found: LowRank) -> bool:
    """Whether, with random weights, the split by output and the split by input give the output of the whole module."""
    replay = _with_random_weights(module)
    weight = replay.part.get_submodule(found.base).get_parameter("weight")
    wide_in, wide_out = linear_sizes(replay.part.get_submodule(found.base))
    x = torch.linspace(-1, 1, 6 * wide_in, dtype=weight.dtype, device=weight.device).mul(5).sin().view(2, 3, wide_in)
    try:
        with torch.no_grad():
            whole, nothing = replay.run(args=(x,))[1], replay.run(args=(torch.zeros_like(x),))[1]
            rows = [replay.run(_keeping_outputs(part), args=(x,))[1] for part in _halves(wide_out)]
            columns = [
                replay.run(_keeping_inputs(found, part), args=(x[..., slice(*part)],))[1] for part in _halves(wide_in)
            ]
    except Exception:  # an overridden forward may need other arguments
        return False
    if not isinstance(whole, Tensor) or whole.shape != (2, 3, wide_out):
        return False
    near = 1e-2 * float(whole.abs().max())
    together = torch.cat(rows, -1), torch.stack(columns).sum(0) - nothing
    return all(x.shape == whole.shape and torch.allclose(x, whole, rtol=1e-2, atol=near) for x in together)


def _with_random_weights(module: nn.Module) -> Replay:
    """A copy with random weights in all layers, because new low-rank updates are initialised to zero."""
    copied, generator = copy_of(module), torch.Generator().manual_seed(6)
    for parameter in copied.parameters():
        values = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
        parameter.data = values.to(parameter.dtype).to(parameter.device)
    return Replay(copied, (), {})


def _halves(size: int) -> tuple[Range, Range]:
    return (0, size // 2), (size // 2, size)


def _keeping_outputs(part: Range) -> Prepare:
    return lambda module: keep_outputs(module, [part])


def _keeping_inputs(found: LowRank, part: Range) -> Prepare:
    def prepare(module: nn.Module) -> None:
        for name in (found.base, *found.downs):
            layer = module.get_submodule(name)
            weight = layer.get_parameter("weight")
            weight.data = take(weight.data, 0 if is_transposed(layer) else 1, [part])
            if is_transposed(layer):
                layer.nx = part[1] - part[0]  # type: ignore[assignment]

    return prepare
