"""Values that a layer computes over all tokens beside its hidden state, such as auxiliary losses of routers.

On sequence shards each rank would compute such a value of its own tokens. It is found in two ways: the value of some
tokens is not the recorded one of all, or it has a gradient of a token that is cut away. The first alone is not enough:
a balance near its minimum is nearly the same for any tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_megatron.parallelize.reading.replay import Prepare, Replay
from lightning_megatron.parallelize.trial.training import TOLERANCE

_WIDE = torch.float64
_OF_NUMBERS = 1e-2  # a balance near its minimum hardly differs, and one that depends on no token is the same bits


class AuxiliaryValues:
    """Compares what one layer says beside its hidden state of some tokens with what it says of all.

    Args:
        replay: the layer, with the arguments of all tokens.
        part: cuts every hidden state in a value to some of its tokens.
    """

    def __init__(self, replay: Replay, part: Callable[[Any], Any]) -> None:
        self.replay = replay
        self._part = part
        self._kept: dict[str, Tensor] = {}

    def note(self) -> None:
        """Run all tokens once, for the tensors and numbers that this leaves in attributes and buffers of the layer.

        Raises:
            Exception: any exception of the user's code.
        """
        before: dict[str, tuple[Tensor, Tensor]] = {}

        def look(copied: nn.Module) -> None:
            before.update({name: (x, x.detach().clone()) for name, x in _attributes(copied).items()})

        with torch.enable_grad():
            copied, _ = self.replay.run(look)
        self._kept = {name: x.detach() for name, x in _attributes(copied).items() if _is_written(x, before.get(name))}

    def over_all_tokens(self, cut: Any, run: tuple[nn.Module, Any], recorded: Any, inside: Prepare) -> str:
        """The first value that depends on tokens which are cut away; empty if none does.

        Args:
            cut: positional and keyword arguments of a run on some tokens.
            run: the layer after that run, and its output.
            recorded: its output of all tokens.
            inside: lets the modules which get all tokens on every rank return what they returned of all tokens.
        """
        copied, output = run
        now = _attributes(copied)
        sides = dict(_outputs(output, recorded))
        sides |= {f"its `{name}`": (now[name], value) for name, value in self._kept.items() if name in now}
        alike = {name: (got, want) for name, (got, want) in sides.items() if _alike(got, want)}
        for name, (got, want) in alike.items():
            if deviation(got, want) > _OF_NUMBERS * TOLERANCE.get(want.dtype, 1e-4):
                return name
        return self._by_gradient(list(alike), cut, inside) if alike else ""

    def _by_gradient(self, names: list[str], cut: Any, inside: Prepare) -> str:
        """The first of these values that has a gradient of a token which is cut away; empty if none has.

        The parameters get noise: a router of zeros has no gradient of any token.
        """
        hidden: list[Tensor] = []

        def leaf(x: Any, of_some: Any) -> Any:
            if not isinstance(x, Tensor) or x.shape == of_some.shape or not x.is_floating_point():
                return x
            hidden.append(x.detach().requires_grad_())
            return hidden[-1]

        def prepare(part: nn.Module) -> None:
            _add_noise(part)
            inside(part)

        args, kwargs = tree_map(leaf, (self.replay.args, self.replay.kwargs), cut)
        if not hidden:
            return ""
        try:
            with torch.enable_grad():
                copied, output = self.replay.run(prepare, args=args, kwargs=kwargs)
        except Exception:  # the module's code may check its numbers: then their values alone decide
            return ""
        values = {name: x for name, (x, _) in _outputs(output, output)}
        values |= {f"its `{name}`": x for name, x in _attributes(copied).items()}
        for name in names:
            value = values.get(name)
            if not (isinstance(value, Tensor) and value.requires_grad):
                continue
            weights = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype, device=value.device).view_as(value)
            found = torch.autograd.grad((value * weights).sum(), hidden, retain_graph=True, allow_unused=True)
            if any(x is not None and x.count_nonzero() > self._part(x).count_nonzero() for x in found):
                return name
        return ""


def deviation(got: Tensor, want: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest entry of ``want``."""
    if not want.numel():
        return 0.0
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-30))


def _alike(got: Any, want: Any) -> bool:
    if not (isinstance(got, Tensor) and isinstance(want, Tensor)):
        return False
    return got.shape == want.shape and want.is_floating_point()


def _outputs(got: Any, want: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Pairs of the leaves of two outputs of a module, by name."""
    for index, pair in enumerate(zip(tree_leaves(got), tree_leaves(want), strict=False)):
        yield f"output {index}", pair


def _attributes(module: nn.Module) -> dict[str, Tensor]:
    """Tensors and fractions in plain attributes and buffers of a module and its submodules, by dotted name."""
    found: dict[str, Tensor] = {}
    for name, part in module.named_modules():
        for key, x in (*vars(part).items(), *part._buffers.items()):
            if isinstance(x, (Tensor, float)):
                found[f"{name}.{key}".lstrip(".")] = torch.as_tensor(x, dtype=None if isinstance(x, Tensor) else _WIDE)
    return found


def _is_written(now: Tensor, before: tuple[Tensor, Tensor] | None) -> bool:
    """Whether a tensor is another one than before, or was changed in place, as states of torchmetrics objects are."""
    if before is None or now is not before[0]:
        return True
    return now.shape != before[1].shape or not torch.equal(now.detach(), before[1])


def _add_noise(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(21)
    with torch.no_grad():
        for parameter in filter(torch.is_floating_point, module.parameters()):
            noise = torch.randn(parameter.shape, generator=generator) / max(1, parameter.shape[-1:].numel()) ** 0.5
            parameter.add_(noise.to(parameter.device, parameter.dtype), alpha=0.5)
