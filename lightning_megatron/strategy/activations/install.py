"""Lets the layers of a module keep their activations elsewhere, or in pieces, for the length of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron.mesh.messages.host_link import HostLink
from lightning_megatron.pipeline.cut.trunk import find_trunk
from lightning_megatron.pipeline.forwards.stack import ForwardSlot, ForwardStack
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.strategy.activations.host_budget import (
    HeldCalls,
    Host,
    HostBudget,
    Neighbours,
    layers_of_stages,
)
from lightning_megatron.strategy.activations.host_copies import Traffic
from lightning_megatron.strategy.activations.host_request import ActivationOffload, HostRequest, host_request
from lightning_megatron.strategy.activations.layer_calls import HostCall, chosen_layers
from lightning_megatron.strategy.activations.mlp_pieces import MlpChunks, MlpPieces
from lightning_megatron.strategy.activations.token_calls import TokenCall


class ActivationOptions(NamedTuple):
    """Requests for activations: which are kept in host memory, and which modules run in pieces of the tokens."""

    host: HostRequest | None = None
    chunks: MlpChunks = None

    @classmethod
    def of(cls, offload: ActivationOffload, chunks: MlpChunks) -> ActivationOptions:
        """The requests in the strategy's options."""
        return cls(host_request(offload), chunks)

    @property
    def runs_tokens(self) -> bool:
        """Whether layers may run again on some of their tokens."""
        return self.host is not None and self.host.splits


def arrange(
    module: nn.Module,
    stage: Stage | None,
    pipeline_layers: str,
    options: ActivationOptions,
    device: torch.device,
    host: Host,
    tensor: dist.ProcessGroup | None = None,
) -> tuple[Traffic | None, MlpPieces | None]:
    """Call `keep_on_host` and `run_in_pieces` for the layers of a module on ``device``."""
    traffic = keep_on_host(module, stage, pipeline_layers, options.host, host.link(device), tensor, host)
    return traffic, run_in_pieces(module, stage, pipeline_layers, options.chunks)


def keep_on_host(
    module: nn.Module,
    stage: Stage | None,
    pipeline_layers: str,
    request: HostRequest | None,
    link: HostLink,
    tensor: dist.ProcessGroup | None = None,
    host: Host | None = None,
) -> Traffic | None:
    """Let layers keep their activations in host memory; call it once the module is cut.

    Args:
        module: the module.
        stage: this rank's, where it is cut.
        pipeline_layers: name of the list of layers where it is not, or ``"auto"``.
        request: which of them, and of how many tokens; ``None`` removes the wrappers of an earlier run.
        link: what copies between device and host.
        tensor: ranks that have slices of the same layers, if there are several.
        host: whose memory it is; by default that of this process.

    Returns:
        What counts the copies; ``None`` where nothing was asked for.

    Raises:
        ValueError: there are no layers, or a pattern matches none.
    """
    try:
        trunk = find_trunk(module, pipeline_layers) if stage is None else stage.partition.trunk
    except ValueError as error:
        if request is None:
            return None
        raise ValueError(f"`activation_offload` is for what repeated layers keep: {error}") from error
    for layer in trunk.layers(module):
        ForwardStack.of(layer).remove(ForwardSlot.HOST)
    if request is None:
        return None
    names = chosen_layers(trunk, request, trunk.layer_names if stage is None else stage.presence.layers_here())
    calls, host = _calls_of(stage, chosen_layers(trunk, request, trunk.layer_names)), host or Host()
    mine = 0 if stage is None else stage.stage
    neighbours = Neighbours(mine, host.stages(mine), calls)
    budget = HostBudget(request.tokens, request.words, neighbours, len(names), link, tensor, host)
    traffic = Traffic(link, budget if request.tokens is None else None)
    for name in names:
        kind = TokenCall if request.splits else HostCall
        kind(module.get_submodule(name), name, traffic, budget).install()
    return traffic


def _calls_of(stage: Stage | None, chosen: Sequence[str]) -> HeldCalls:
    """Gives, by stage, how many calls of layers it keeps at a time, in the step that runs."""
    if stage is None:
        return HeldCalls([len(chosen)], lambda: None)
    numbers = [number for number, name in enumerate(stage.partition.trunk.layer_names) if name in chosen]
    layers = layers_of_stages(stage.partition.bounds, stage.partition.owners, numbers)
    return HeldCalls(layers, lambda: stage.schedule)


def run_in_pieces(module: nn.Module, stage: Stage | None, pipeline_layers: str, chunks: MlpChunks) -> MlpPieces | None:
    """Find the modules in layers that are to run in pieces of the tokens.

    Args:
        module: the module.
        stage: this rank's, where it is cut.
        pipeline_layers: name of the list of layers where it is not, or ``"auto"``.
        chunks: how many pieces of which modules; ``None``: none.

    Raises:
        ValueError: there are no layers, or a pattern matches no module in them.
    """
    if chunks is None:
        return None
    if stage is not None:
        return MlpPieces(module, stage.presence.layers_here(), chunks)
    try:
        trunk = find_trunk(module, pipeline_layers)
    except ValueError as error:
        raise ValueError(f"`mlp_chunks` is for modules in repeated layers: {error}") from error
    return MlpPieces(module, trunk.layer_names, chunks)


__all__ = ["ActivationOffload", "ActivationOptions", "MlpChunks", "arrange", "keep_on_host", "run_in_pieces"]
