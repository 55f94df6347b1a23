"""Finds split outputs that are read without a gradient, which the graph that a trace reads cannot show.

The module is run again with the columns' outputs disturbed and the rows answering as if they were not. If anything
that the module returns, or keeps in an attribute, is different then, something beside the row-parallel layers has
read a column (a share of active units that is logged, a classifier on detached features).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_megatron.mesh.parts.names import lies_in
from lightning_megatron.parallelize.pairs.regions import Region
from lightning_megatron.parallelize.reading.trace import Trace, fresh, prepared, tensors_left
from lightning_megatron.parallelize.trial.replay import TOLERANCE


def read_elsewhere(module: nn.Module, trace: Trace, groups: Sequence[Sequence[Region]]) -> set[str]:
    """Columns of those regions whose outputs something else than their row-parallel layers reads.

    Args:
        module: the traced module.
        trace: its trace.
        groups: regions, equal ones in one group, which are told apart only together.
    """
    found: set[str] = set()
    for root in trace.roots:
        inside = [
            [r for r in group if all(lies_in(n, root) and n in trace.calls for n in r.members)] for group in groups
        ]
        every = [region for group in inside for region in group]
        run = _Run(module, trace, root, every)
        if not every or not run.differs(every):
            continue
        for group in inside:
            if group and run.differs(group):
                found |= {name for region in group for name in region.columns}
    return found


class _Run:
    """Runs of one traced module in which its row-parallel layers answer as they did the first time."""

    def __init__(self, module: nn.Module, trace: Trace, root: str, regions: Sequence[Region]) -> None:
        self._module = module
        self._root = module.get_submodule(root)
        self._call = trace.calls[root]
        self._answers: dict[str, list[Any]] = {region.row: [] for region in regions}
        self._plain = self._results(self._recording) if regions else None

    def differs(self, regions: Sequence[Region]) -> bool:
        """Whether results change with the columns of these regions; False where the module does not repeat itself."""
        if self._plain is None or self._changed(self._results(self._answering)):
            return False
        return self._changed(self._results(lambda: self._disturbing(regions)))

    def _changed(self, results: list[Tensor] | None) -> bool:
        if results is None or self._plain is None or len(results) != len(self._plain):
            return False
        return any(_differ(a, b) for a, b in zip(results, self._plain, strict=True))

    def _results(self, hooks: Callable[[], contextlib.AbstractContextManager[None]]) -> list[Tensor] | None:
        with prepared(self._root), torch.no_grad(), hooks():
            torch.manual_seed(0)
            try:
                output = self._root(*tree_map(fresh, self._call.args), **tree_map(fresh, self._call.kwargs))
            except Exception:  # disturbed values may be refused anywhere; nothing is known then
                return None
            return [x.clone() for x in tensors_left(self._root, output)]

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        with self._hooked({name: _keeping(answers) for name, answers in self._answers.items()}):
            yield

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        with self._hooked({name: _giving(list(answers)) for name, answers in self._answers.items()}):
            yield

    @contextlib.contextmanager
    def _disturbing(self, regions: Sequence[Region]) -> Iterator[None]:
        with self._answering(), self._hooked({name: _disturb for region in regions for name in region.columns}):
            yield

    @contextlib.contextmanager
    def _hooked(self, hooks: dict[str, Callable[..., Any]]) -> Iterator[None]:
        handles = [self._module.get_submodule(name).register_forward_hook(hook) for name, hook in hooks.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _keeping(answers: list[Any]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        answers.append(output.clone())

    return hook


def _giving(answers: list[Any]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return answers.pop(0).clone()

    return hook


def _disturb(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    scale = output.abs().amax().clamp_min(1e-3)
    noise = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).mul(9).sin()
    return output + scale * noise.view_as(output)


def _differ(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    if not one.is_floating_point():
        return not torch.equal(one, other)
    tolerance = TOLERANCE.get(one.dtype, 1e-4) * 0.1
    finite = torch.isfinite(other)
    scale = other[finite].abs().amax() if bool(finite.any()) else 0.0
    return bool(((one - other)[finite].abs() > tolerance * scale).any())
