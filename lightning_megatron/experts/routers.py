"""Which parameters choose experts: what lies beside the experts in the module that calls them."""

from __future__ import annotations

from torch import nn

from lightning_megatron.experts.listed import ListedExperts, listed_experts, routes
from lightning_megatron.experts.stacked import StackedExperts, stacked_experts
from lightning_megatron.experts.twin import Led
from lightning_megatron.mesh.marks import Marks
from lightning_megatron.mesh.parts.names import parent

ABOVE = 2
"""How many modules above a list of experts are looked at for their router."""


def routers_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The routers' trained parameters by name, whether experts are shared out or not: those that have a value for each
    expert; or whatever is beside the experts, where none has.
    """
    found: dict[str, nn.Parameter] = {}
    for name, child in module.named_modules():
        led = Marks.of(child).get(Led)
        leader = led.leader if led is not None else None
        if isinstance(leader, ListedExperts):
            found |= _beside(child, child.get_submodule(leader.path), name, leader.count)
        elif name and (count := leader.count if isinstance(leader, StackedExperts) else stacked_experts(child)):
            found |= _beside(module.get_submodule(parent(name)), child, parent(name), count)
        elif count := listed_experts(child):
            above = name
            for _ in range(ABOVE if name else 0):
                above = parent(above)
                if routes(module.get_submodule(above), child, count):
                    found |= _beside(module.get_submodule(above), child, above, count)
                    break
    return found


def _beside(block: nn.Module, experts: nn.Module, name: str, count: int) -> dict[str, nn.Parameter]:
    """Parameters of ``block``, called ``name``, that are not its experts'."""
    below = {id(parameter) for parameter in experts.parameters()}
    beside = {
        f"{name}.{leaf}" if name else leaf: parameter
        for leaf, parameter in block.named_parameters()
        if id(parameter) not in below and parameter.requires_grad
    }
    return {leaf: parameter for leaf, parameter in beside.items() if count in parameter.shape} or beside
