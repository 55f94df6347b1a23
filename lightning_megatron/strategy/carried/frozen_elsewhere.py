"""Flags of the parameters of other stages, for steps that ask what is trained.

A hook that unfreezes layers goes over those of its own stage, and a step that goes by it runs on the last one. A step
that freezes some by its loss does so there as well, and the next step trains what it has left::

    if any(p.requires_grad for p in self.backbone.parameters()):
    if loss < 1: self.backbone.requires_grad_(False)
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from types import FunctionType

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import raw_all_reduce
from lightning_megatron.mesh.parts.syntax import definition_of, place_in
from lightning_megatron.pipeline.elsewhere.presence import Presence
from lightning_megatron.pipeline.elsewhere.reachable import functions_of_step, names_in

_FREEZES = frozenset({"requires_grad_", "freeze", "unfreeze"})


def line_of_freezing(functions: Iterable[FunctionType]) -> str:
    """The first line that sets which parameters are trained; "" where there is none.

    Args:
        functions: that a step calls.
    """
    for function in functions:
        definition, code = definition_of(function), function.__code__
        nodes = ast.walk(definition) if definition is not None else ()
        for node in (each for each in nodes if isinstance(each, ast.Attribute)):
            if node.attr in _FREEZES or (node.attr == "requires_grad" and isinstance(node.ctx, ast.Store)):
                return place_in(code, node.lineno)
    return ""


class FrozenElsewhere:
    """Tells the stages of a pipeline of each other's flags.

    Args:
        module: the user's, cut.
        presence: what of it is here.
        group: the stages.
        device: where tensors live.
    """

    def __init__(
        self, module: pl.LightningModule, presence: Presence, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._module, self._device, self._group = module, device, group
        self._presence, self._stage = presence, presence.stage
        entries = presence.entries.values()
        self._parameters = {entry.first: entry for entry in entries if isinstance(entry.twin, nn.Parameter)}
        self._asks: bool | None = None
        self._sets = ""
        self._begun: list[bool] = []

    def share(self) -> None:
        """Before a training step; collective over the stages where its code mentions flags."""
        if self._asks is None:
            functions = functions_of_step(self._module)
            mentioned = any("requires_grad" in names_in(each.__code__)[0] for each in functions)
            told = objects.gather((mentioned, line_of_freezing(functions)), self._group)
            self._sets = next((line for _, line in told if line), "")
            self._asks = bool(self._sets) or any(mentions for mentions, _ in told)
        if not self._asks:
            return
        here = self._here()
        (flags,) = self._most([name in here and here[name].requires_grad for name in self._parameters])
        for entry, flag in zip(self._parameters.values(), flags, strict=True):
            if self._stage not in entry.stages and entry.twin.requires_grad != flag:
                entry.twin.requires_grad_(flag)
        self._begun = self._flags(here)

    def check(self) -> None:
        """After its backward, before an optimizer goes by what it has left; collective over the stages likewise.

        Raises:
            RuntimeError: the step has set the flag of a parameter on some stage, and has not where the parameter is;
                names the line.
        """
        if not self._sets or not self._begun:
            return
        here = self._here()
        set_now = [flag != was for flag, was in zip(self._flags(here), self._begun, strict=True)]
        left = [name in here and not is_set for name, is_set in zip(self._parameters, set_now, strict=True)]
        told = zip(self._parameters, *self._most(set_now, left), strict=True)
        missed = [name for name, is_set, is_left in told if is_set and is_left]
        if missed:
            more = f" and {len(missed) - 1} others are" if missed[1:] else " is"
            raise RuntimeError(
                f"`training_step` sets whether `{missed[0]}`{more} trained ({self._sets}) behind the layers, where "
                "the pipeline stage that has them does not come. Set `requires_grad_` in `on_train_batch_start`, by "
                "what an earlier step has kept, or use `pipeline_parallel_size=1`."
            )

    def _here(self) -> dict[str, nn.Parameter]:
        places = self._presence.entries
        own = type(self._module).named_parameters(self._module, remove_duplicate=False)
        return {places[name].first: tensor for name, tensor in own if name in places}

    def _flags(self, here: Mapping[str, nn.Parameter]) -> list[bool]:
        return [here.get(name, entry.twin).requires_grad for name, entry in self._parameters.items()]

    def _most(self, *rows: list[bool]) -> list[list[bool]]:
        """Whether any stage has a flag."""
        flags = torch.tensor(rows, dtype=torch.long, device=self._device)
        told: list[list[int]] = raw_all_reduce(flags, self._group, keep=False, maximum=True).tolist()
        return [list(map(bool, row)) for row in told]
