"""Buffers that several stages have: of modules outside the layers, and of those that layers share.

Each stage writes into them what it computes from real values; what stand-ins wrote is taken back at the end of a run
(:mod:`~lightning_megatron.pipeline.elsewhere.away`). So the stages that have changed one tell whose numbers count::

    the last, whether others did or not   its own, sent with what the step left behind: it gets furthest
    one other                             its own: a running mean before the layers
    several others, or, of statistics of a norm, some that differ    no stage has what one process has: refused
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages.collectives import raw_all_reduce, raw_broadcast
from lightning_megatron.mesh.parts.names import Parts, owner_and_leaf, parent
from lightning_megatron.pipeline.elsewhere.away import LARGEST, STATE
from lightning_megatron.pipeline.elsewhere.presence import Presence
from lightning_megatron.pipeline.elsewhere.undo import Contents


class SharedBuffers:
    """Keeps them equal on all stages.

    Args:
        module: the user's module.
        presence: names them, and says which stages have them.
        mesh: the grid.
        device: where tensors live.
    """

    def __init__(self, module: nn.Module, presence: Presence, mesh: ParallelMesh, device: torch.device) -> None:
        self._module, self._mesh, self._device = module, mesh, device
        self._names = list(presence.shared_buffers)
        self._here = [name for name in self._names if presence.is_here(name)]
        self._twins = {name: presence.entries[name].twin for name in self._names if name not in self._here}
        norms = {name for name, child in module.named_modules() if isinstance(child, _NormBase)}
        self._statistics = [name for name in self._names if parent(name) in norms]
        layers = Parts(presence.layer_names())
        paths = Counter(
            id(child)
            for name, child in module.named_modules(remove_duplicate=False)
            if layers.of(name) not in (None, name)
        )
        owners = {name: module.get_submodule(parent(name)) for name in self._names}
        self._of_layers = [name for name in self._names if paths[id(owners[name])] > 1]
        self._before: dict[str, Contents] = {}
        self._writers: dict[str, int] | None = None
        self._changed: list[str] | None = None

    def snapshot(self) -> None:
        """Remember them as they are before a step."""
        self._changed = None
        STATE.undone.clear()
        for name in self._here:
            buffer = self._module.get_buffer(name)
            self._before[name] = Contents.of_tensor(buffer, copies=buffer.numel() <= LARGEST)

    def changed(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values of those that were written here since."""
        for name in self._here if self._changed is None else self._changed:
            buffer = self._module.get_buffer(name)
            if self._changed is not None or self._before[name].is_changed(buffer, uncounted=name in self._statistics):
                yield name, buffer

    def set(self, name: str, value: Tensor) -> None:
        """Put a value into the place of one."""
        owner, leaf = owner_and_leaf(self._module, name)
        owner._buffers[leaf] = value

    def share(self) -> None:
        """Hand round those that one stage but the last has written in the first step. Collective over the pipeline.

        Raises:
            RuntimeError: several stages have; on every rank.
        """
        if not self._names:
            return
        self._changed = [name for name, _ in self.changed()]
        if self._writers is None:
            self._writers = self._find_writers(self._changed)
        group = self._mesh.group("pipeline_parallel")
        for name, stage in self._writers.items():
            value = self._value(name).detach().clone(memory_format=torch.contiguous_format)
            raw_broadcast(value, self._mesh.pipeline_ranks[stage], group)
            if name in self._here:
                self.set(name, value)

    def _value(self, name: str) -> Tensor:
        """The buffer; on a stage that has none, a tensor of its form."""
        if name in self._here:
            return self._module.get_buffer(name)
        twin = self._twins[name]
        return torch.zeros_like(twin, device=self._device)

    def check(self, told: Collection[str]) -> None:
        """Complain about one that was written here, of which the last stage does not know, after the first step.

        Args:
            told: names of those that it has written.

        Raises:
            RuntimeError: naming it.
        """
        for name in self._changed or ():
            if name not in told and name not in (self._writers or ()):
                raise RuntimeError(
                    f"pipeline stage {self._mesh.stage} has written into the buffer `{name}`, into which no stage but "
                    "the last wrote in the first step. Write into it from the first step on, keep it in a module of "
                    "its own that runs before the layers, or use `pipeline_parallel_size=1`."
                )

    def _find_writers(self, mine: Collection[str]) -> dict[str, int]:
        """The stage that writes, for those that the last one does not write."""
        group, stages = self._mesh.group("pipeline_parallel"), self._mesh.layout.pipeline
        flags = torch.zeros(stages, len(self._names), device=self._device)
        flags[self._mesh.stage] = torch.tensor([float(name in mine) for name in self._names], device=self._device)
        table = raw_all_reduce(flags, group, keep=False).bool().cpu()
        writers = {name: table[:, at].nonzero().flatten().tolist() for at, name in enumerate(self._names)}
        found: dict[str, int] = {}
        last = self._mesh.pipeline_ranks.index(self._mesh.loss_rank)
        for name, at in writers.items():
            several = len(at) > 1 and (last not in at or name in self._of_layers)
            if several or (len(at) > 1 and name in self._statistics and not self._is_same(name)):
                raise RuntimeError(
                    f"pipeline stages {at} have each written into the buffer `{name}`, of which one process has one: "
                    "its module runs between layers, in several layers, or before and after them. Give each place a "
                    "module of its own (of a batch norm: or use `nn.LayerNorm`), or use `pipeline_parallel_size=1`."
                )
            if at and last not in at:
                found[name] = at[0]
        return found

    def _is_same(self, name: str) -> bool:
        """Whether one is equal on all stages."""
        group, buffer = self._mesh.group("pipeline_parallel"), self._value(name).double()
        both = torch.stack([buffer, -buffer]).contiguous()
        if name not in self._here:
            both.fill_(-torch.inf)
        highest, lowest = raw_all_reduce(both, group, keep=True, maximum=True)
        return torch.equal(highest, -lowest)
