"""Finds the parameters that choose experts: those beside the experts in the module that calls them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from lightning_megatron.experts.kinds.blocks import BlockedExperts, blocked_experts
from lightning_megatron.experts.kinds.gathered import GatheredExperts
from lightning_megatron.experts.kinds.in_turn import runs_in_turn
from lightning_megatron.experts.kinds.listed import ListedExperts, ListsInTurn, has_one_for_each, listed_experts, routes
from lightning_megatron.experts.kinds.stacked import StackedExperts, stacked_experts
from lightning_megatron.experts.kinds.twin import Led
from lightning_megatron.mesh.marks import Marks
from lightning_megatron.mesh.parts.names import lies_in, parent

ABOVE = 2
"""How many modules above a list of experts are looked at for their router."""


@dataclass(frozen=True)
class Mixture:
    """A router and its experts, as a module has them, shared out or not.

    Attributes:
        name: of the module that holds the router.
        block: that module.
        experts: a module of stacked experts, or a list of experts.
        path: name of ``experts``.
        count: how many experts all ranks have.
        all_rows: whether each expert takes a row of every token, so that there is no load to count.
    """

    name: str
    block: nn.Module
    experts: nn.Module
    path: str
    count: int
    all_rows: bool = False

    @property
    def leader(self) -> ListedExperts | None:
        """The object that leads the calls of a list of experts that are shared out."""
        led = Marks.of(self.block).get(Led)
        lists = led.leader.lists if led is not None and isinstance(led.leader, ListsInTurn) else []
        return next((each for each in lists if self.block.get_submodule(each.path) is self.experts), None)


def mixtures_of(module: nn.Module) -> Iterator[Mixture]:
    """The mixtures in a module, whether experts are shared out or not."""
    inside: set[nn.Module] = set()  # of experts, of which each is on one rank with all that is in it
    for name, child in module.named_modules():
        if child in inside:
            continue
        led = Marks.of(child).get(Led)
        leader = led.leader if led is not None else None
        if isinstance(leader, GatheredExperts):
            inside |= set(child.modules())  # which of its rows go where is not known
        elif isinstance(leader, ListsInTurn):
            for listed in leader.lists:
                experts = child.get_submodule(listed.path)
                inside |= set(experts.modules())
                yield Mixture(name, child, experts, f"{name}.{listed.path}" if name else listed.path, listed.count)
        elif name and (count := leader.count if isinstance(leader, StackedExperts) else stacked_experts(child)):
            inside |= set(child.modules())
            yield Mixture(parent(name), module.get_submodule(parent(name)), child, name, count)
        elif name and (count := leader.count if isinstance(leader, BlockedExperts) else blocked_experts(child)):
            block = module.get_submodule(parent(name))
            if routes(block, child, count):
                yield Mixture(parent(name), block, child, name, count, all_rows=True)
        elif (count := listed_experts(child)) and not runs_in_turn(module, name):
            above = name
            for _ in range(ABOVE if name else 0):
                above = parent(above)
                if routes(module.get_submodule(above), child, count):
                    inside |= set(child.modules())
                    yield Mixture(above, module.get_submodule(above), child, name, count)
                    break


def routers_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The routers' trained parameters by name, whether experts are shared out or not: those that have a value for each
    expert; or whatever is beside the experts, where none has.
    """
    found: dict[str, nn.Parameter] = {}
    for mixture in mixtures_of(module):
        found |= _beside(mixture.block, mixture.experts, mixture.name, mixture.count)
    for name, child in module.named_modules():
        led = Marks.of(child).get(Led)
        if led is not None and isinstance(led.leader, GatheredExperts):
            found |= _around_gathered(module, name, led.leader)
    return found


def gathered_in(module: nn.Module) -> str:
    """Name of a module whose weights are gathered when it is called; "" if there is none."""
    led = ((name, Marks.of(child).get(Led)) for name, child in module.named_modules())
    return next((name for name, each in led if each is not None and isinstance(each.leader, GatheredExperts)), "")


def _around_gathered(module: nn.Module, name: str, leader: GatheredExperts) -> dict[str, nn.Parameter]:
    """Parameters that every rank has whole, in a module whose weights are gathered, or else beside it."""
    parts = {f"{name}.{leaf}" for leaf in leader.parts}
    for around in (name, parent(name)):
        own = {n: p for n, p in module.named_parameters() if lies_in(n, around) and n not in parts and p.requires_grad}
        if own:
            return own
    return {}


def _beside(block: nn.Module, experts: nn.Module, name: str, count: int) -> dict[str, nn.Parameter]:
    """Parameters of ``block``, called ``name``, that are not its experts'."""
    below = {id(parameter) for parameter in experts.parameters()}
    beside = {
        f"{name}.{leaf}" if name else leaf: parameter
        for leaf, parameter in block.named_parameters()
        if id(parameter) not in below and parameter.requires_grad
    }
    return {leaf: parameter for leaf, parameter in beside.items() if has_one_for_each(parameter, count)} or beside
