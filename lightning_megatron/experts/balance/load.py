"""How many rows each expert gets in a step, on this rank."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.hooks import RemovableHandle

from lightning_megatron.experts.exchange.rows_here import rows_here
from lightning_megatron.experts.kinds.listed import experts_of
from lightning_megatron.experts.kinds.stacked import Choice
from lightning_megatron.experts.routers import Mixture, gathered_in, mixtures_of
from lightning_megatron.layers.whole import WholeTensor
from lightning_megatron.mesh.autograd import in_backward
from lightning_megatron.mesh.lazy import figure, save_figure

_COLUMNS = 4


class ExpertCounts:
    """Counts the rows that this rank's tokens give each expert of each mixture, wherever the expert is.

    Args:
        module: the user's, divided.
        counts: whether what runs now counts: trials and evaluation do not.
        counts_whole: whether this rank counts tokens that all context ranks have; those that are split it always does.
    """

    def __init__(self, module: nn.Module, counts: Callable[[], bool], *, counts_whole: bool = True) -> None:
        self._counts, self._counts_whole = counts, counts_whole
        self._rows: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        if hidden := gathered_in(module):
            raise ValueError(
                f"the rows of each expert are counted (ExpertLoad, ExpertBias), but `expert_parallel_plan` gathers the "
                f"weights of `{hidden}`, of which it is not known which rows go to which expert; leave one of them out."
            )
        self._mixtures = [mixture for mixture in mixtures_of(module) if not mixture.all_rows]
        for mixture in self._mixtures:
            device = next((p.device for p in mixture.block.parameters()), torch.device("cpu"))
            self._rows[mixture.path] = torch.zeros(mixture.count + 1, dtype=torch.long, device=device)
            self._follow(mixture)

    def _follow(self, mixture: Mixture) -> None:
        add = functools.partial(self._add, mixture.path)
        if (leader := mixture.leader) is not None:
            leader.sees = add if leader.sees is None else _both(leader.sees, add)
        elif isinstance(mixture.experts, nn.ModuleList | nn.ModuleDict):
            for number, expert in enumerate(experts_of(mixture.experts)):
                hook = functools.partial(self._add_rows, mixture.path, number)
                self._handles.append(expert.register_forward_pre_hook(hook))
        else:
            hook = functools.partial(_choice, add)
            self._handles.append(mixture.experts.register_forward_pre_hook(hook, with_kwargs=True))

    def take(self) -> dict[str, list[int]]:
        """Rows of each expert since the last call, by name of the experts."""
        found = {name: rows[:-1].tolist() for name, rows in self._rows.items()}
        for rows in self._rows.values():
            rows.zero_()
        return found

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        for mixture in self._mixtures:
            if (leader := mixture.leader) is not None:
                leader.sees = None

    def _add(self, name: str, expert: Tensor) -> None:
        if isinstance(expert, FakeTensor) or in_backward() or not self._counts() or not self._is_counted(expert):
            return
        expert = rows_here(expert)
        rows = self._rows[name]
        index = expert.detach().reshape(-1).to(rows.device, torch.long).clamp(max=len(rows) - 1)  # the last: of none
        rows.index_add_(0, index, torch.ones_like(index))

    def _add_rows(self, name: str, number: int, _: nn.Module, args: tuple[Any, ...]) -> None:
        given = args[0] if args else None
        if not isinstance(given, Tensor) or isinstance(given, FakeTensor) or not self._counts() or in_backward():
            return
        if self._is_counted(given):
            self._rows[name][number] += rows_here(given)[..., 0].numel()

    def _is_counted(self, given: Tensor) -> bool:
        return self._counts_whole or (isinstance(given, WholeTensor) and given.is_by_rows)


def _both(one: Callable[[Tensor], None], other: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    def tell(expert: Tensor) -> None:
        one(expert)
        other(expert)

    return tell


def _choice(add: Callable[[Tensor], None], experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    bound = inspect.signature(type(experts).forward).bind(experts, *args, **kwargs)
    bound.apply_defaults()
    add(Choice(list(bound.arguments.values())[1:]).index)


def load_svg(steps: Sequence[int], load: Mapping[str, Sequence[Sequence[int]]]) -> str:
    """Draw the load of experts over steps, as an SVG document: one field per layer, a row for each expert.

    Args:
        steps: numbers of the steps.
        load: by name of the experts, for each of these steps, the rows of each expert.

    Raises:
        ImportError: matplotlib is not installed.
    """
    lines = -(-len(load) // _COLUMNS)
    drawn = figure(4.0 * min(len(load), _COLUMNS), 2.6 * lines + 0.6)
    fields = drawn.subplots(lines, min(len(load), _COLUMNS), squeeze=False).flatten()
    for field, (name, rows) in zip(fields, load.items(), strict=False):
        shares = torch.tensor(rows, dtype=torch.float64)
        shares = shares / shares.mean(1, keepdim=True).clamp(min=1e-12)
        ends = steps[0] - 0.5, steps[-1] + 0.5, shares.shape[1] - 0.5, -0.5
        image = field.imshow(shares.T.tolist(), aspect="auto", extent=ends, vmin=0.0, vmax=2.0, cmap="coolwarm")
        field.set_title(name, fontsize=8)
        field.set(xlabel="step", ylabel="expert")
        drawn.colorbar(image, ax=field, label="rows / mean")
    for field in fields[len(load) :]:
        field.set_axis_off()
    return save_figure(drawn, "svg").decode()
