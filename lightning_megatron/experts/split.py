"""Finds the experts of a module, tries them on a copy, and leaves each rank its own."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron.experts.exchange.folding import Folding
from lightning_megatron.experts.exchange.sending import Owners
from lightning_megatron.experts.exchange.taking_part import Calls
from lightning_megatron.experts.kinds.blocks import BlockedExperts, blocked_experts, cut_blocks, try_blocks
from lightning_megatron.experts.kinds.inner_cut import InnerCut, with_block
from lightning_megatron.experts.kinds.listed import ListedExperts, experts_of, lead_list, listed_experts, routes
from lightning_megatron.experts.kinds.probe import cut_one, cut_stacked, draws, mixes_samples, try_listed, try_stacked
from lightning_megatron.experts.kinds.sized import SizedExperts, sized_experts, try_sized
from lightning_megatron.experts.kinds.stacked import StackedExperts, stacked_experts
from lightning_megatron.experts.kinds.twin import lead
from lightning_megatron.experts.routers import ABOVE
from lightning_megatron.layers import MoE
from lightning_megatron.layers.table import ParameterSharding, ShardTable, apply_specs
from lightning_megatron.mesh.marks import Marks
from lightning_megatron.mesh.mesh import ExpertGroups
from lightning_megatron.mesh.messages.collectives import raw_broadcast
from lightning_megatron.mesh.parts.boxes import ShardSpec
from lightning_megatron.mesh.parts.names import parent
from lightning_megatron.parallelize.reading.copy import copy_of

_Verdict = TypeVar("_Verdict")


@dataclass(frozen=True)
class Found:
    """A mixture that can be shared out.

    Attributes:
        name: of the experts.
        count: how many there are.
        cut: leaves each rank its own, and fills the table.
        gathers: whether a call gives tokens with their experts, so that all ranks can get all tokens.
    """

    name: str
    count: int
    cut: Callable[[Owners, ShardTable], None]
    gathers: bool = False


@dataclass
class ExpertReport:
    """What is split over expert ranks.

    Attributes:
        table: how this rank holds each of the experts' parameters.
        split: name of each module of experts -> how many experts it has.
        whole: name of what looks like experts but stays whole -> why.
    """

    table: ShardTable = field(default_factory=dict)
    split: dict[str, int] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)

    def explain(self) -> str:
        """What was split and what was not, in words."""
        lines = [f"`{name}`: {count} experts" for name, count in self.split.items()]
        return "; ".join([*lines, *(f"`{name}` stays whole: {why}" for name, why in self.whole.items())])


class ExpertSplit:
    """Shares out the experts of a module, in two steps: layers around them may be split in between.

    Args:
        module: whole, the same on every rank except for the values of its parameters.
        size: over how many ranks.
        parts: over how many further ones each expert is cut.
        per_replica: whether what a module makes of a whole batch is meant to be that of each replica.
        gathers: whether all ranks get all tokens, instead of rows for their experts.

    Attributes:
        report: what was found.

    Raises:
        ValueError: there are no experts that can be shared out, or their number is not divisible by the ranks; or they
            cannot be cut.
    """

    def __init__(
        self, module: nn.Module, size: int, parts: int = 1, *, per_replica: bool = False, gathers: bool = False
    ) -> None:
        self._module, self._parts, self._gathers, self.report = module, parts, gathers, ExpertReport()
        self._found = _Finder(module, size, parts, self.report, per_replica).found()
        for mixture in self._found:
            if mixture.count % size:
                raise ValueError(_indivisible(mixture.name, mixture.count, size))
            if gathers and not mixture.gathers:
                raise ValueError(_not_gathered(mixture.name))
            self.report.split[mixture.name] = mixture.count
        if not self._found:
            raise ValueError(_none_found(module, self.report, size, parts))

    def cut(self, groups: ExpertGroups, *, on_shards: Collection[str] = ()) -> ExpertReport:
        """Leave each rank its own, in place. Collective over the ranks of a stage.

        Values of the experts become those of rank 0 of each group.

        Args:
            groups: of this rank.
            on_shards: names of parameters that act on a part of a replica's tokens only (sequence parallelism); what
                other experts are given, all tensor ranks have.
        """
        calls = Marks.of(self._module).put(Calls(groups.group))
        for mixture in self._found:
            parameters = self._module.get_submodule(mixture.name).named_parameters(mixture.name)
            sees_some = any(name in on_shards for name, _ in parameters)
            folding = Folding(None if sees_some else groups.tensor)
            about = mixture.name, folding, self._parts, self._gathers
            owners = Owners(mixture.count, groups.group, calls, *about)
            mixture.cut(owners, self.report.table)
        return self.report


class _Finder:
    """Looks for mixtures in a module.

    Args:
        module: whole.
        size: over how many ranks they are to be shared out.
        parts: over how many further ones each expert is to be cut.
        report: told what looks like experts, but is none.
        per_replica: see :class:`ExpertSplit`.
    """

    def __init__(self, module: nn.Module, size: int, parts: int, report: ExpertReport, per_replica: bool) -> None:
        self._module, self._size, self._report, self._per_replica = module, size, report, per_replica
        self._parts = parts
        self._tried: dict[object, Any] = {}
        self._names: dict[int, list[str]] = {}
        for name, child in module.named_modules(remove_duplicate=False):
            self._names.setdefault(id(child), []).append(name)

    def found(self) -> list[Found]:
        """All mixtures that can be shared out."""
        candidates: list[Found | None] = []
        inside: set[nn.Module] = set()  # of experts; a mixture in one of them is on one rank as a whole
        for name, child in self._module.named_modules():
            if child in inside:
                continue
            if count := stacked_experts(child) or blocked_experts(child) or sized_experts(child):
                candidates.append(self._stacked(name, child, count))
                inside |= set(child.modules())
            elif (listed := self._listed(name, child)) is not None:
                candidates.append(listed)
                inside |= set(child.modules())
        return [each for each in candidates if each is not None]

    def _stacked(self, name: str, experts: nn.Module, count: int) -> Found | None:
        why, width = self._unlike(experts), 0
        blocked, sized = blocked_experts(experts), sized_experts(experts)
        parts = self._size if count % self._size == 0 else 1
        if not why and sized:
            why, width = self._try(experts, "", lambda copied: try_sized(copied, count, parts))
        elif not why and blocked:
            why, _ = self._try(experts, "", lambda copied: (try_blocks(copied, count, parts), 0))
        elif not why and parts > 1:
            why, _ = self._try(experts, "", lambda copied: (try_stacked(copied, count, parts), 0))
        if not why and name:
            block = self._module.get_submodule(parent(name))
            if not list(self._names[id(block)])[1:] and block is not self._module:
                self._refuse_mixing(parent(name), block)
        if why:
            self._report.whole[name] = why
            return None
        cutting = _cut_sized if sized else cut_blocks if blocked else cut_stacked
        inner = self._inner(name, experts, lambda copied: cutting(copied, count, self._parts))

        def cut(owners: Owners, table: ShardTable) -> None:
            here = None if inner is None else inner.at(owners.part)
            _cut_stacked(experts, name, owners, table, here)
            if sized:
                lead(experts, SizedExperts(name, owners, width))
            else:
                lead(experts, (BlockedExperts if blocked else StackedExperts)(name, owners, here))

        return Found(name, count, cut, not (blocked or sized))

    def _listed(self, name: str, experts: nn.Module) -> Found | None:
        count = listed_experts(experts)
        above = name
        for _ in range(ABOVE if count else 0):
            if not above:
                return None
            above = parent(above)
            router = self._module.get_submodule(above)
            if routes(router, experts, count):
                return self._routed(name, experts, count, above, router)
        return None

    def _routed(self, name: str, experts: nn.Module, count: int, above: str, router: nn.Module) -> Found | None:
        path = name.removeprefix(f"{above}.")
        widths = (0, 0)
        kept = (self._unlike(each) for each in (router, *experts_of(experts)))
        why = next(filter(None, kept), "") or _not_apart(router, experts)
        if not why:
            why, widths = self._try(router, path, lambda copied: try_listed(copied, path))
        if why:
            self._report.whole[name] = why
            return None
        self._refuse_mixing(above, router)
        first = experts_of(experts)[0]
        inner = self._inner(name, first, lambda copied: cut_one(copied, widths[0], self._parts))

        def cut(owners: Owners, table: ShardTable) -> None:
            own = None if inner is None else inner.at(owners.part)
            for number, expert in enumerate(experts_of(experts)):
                _cut_one(expert, self._names[id(expert)][0], number, owners, table, own)
            lead_list(router, ListedExperts(above, path, widths, owners, own))

        return Found(name, count, cut)

    def _inner(self, name: str, experts: nn.Module, trial: Callable[[nn.Module], InnerCut | str]) -> InnerCut | None:
        """How experts are cut; ``None`` if they are not to be."""
        if self._parts == 1:
            return None
        found = self._try(experts, " inner", trial)
        if isinstance(found, str):
            raise ValueError(
                f"the experts of `{name}` cannot be cut over `expert_tensor_parallel_size={self._parts}`: {found}; use "
                "`expert_tensor_parallel_size=1`."
            )
        return found

    def _try(self, module: nn.Module, path: str, trial: Callable[[nn.Module], _Verdict]) -> _Verdict:
        """The verdict of a trial, the same for modules that are alike."""
        settings = tuple(
            sorted((n, str(v)) for n, v in vars(module).items() if isinstance(v, int | float | str | bool))
        )
        key = type(module), path, settings, tuple((n, p.shape, p.dtype) for n, p in module.named_parameters())
        if key not in self._tried:
            copied = copy_of(module)
            meta = any(parameter.is_meta for parameter in module.parameters())
            self._tried[key] = trial(copied.to_empty(device="cpu") if meta else copied.cpu())
        return cast(_Verdict, self._tried[key])

    def _refuse_mixing(self, name: str, module: nn.Module) -> None:
        if isinstance(module, MoE):  # whose capacity is that of all replicas, and whose noise is drawn beside experts
            return
        why, _ = self._try(module, "", lambda copied: (mixes_samples(copied), (0, 0)))
        if not why:
            return
        if self._try(module, " draws", lambda copied: ("random" if draws(copied) else "", (0, 0)))[0]:
            raise ValueError(
                f"`{name}` routes tokens to experts and draws random numbers (noise, dropout), which every replica "
                "draws for its own tokens: set what draws them to 0, or use `expert_parallel_size=1`."
            )
        if not self._per_replica:
            raise ValueError(
                f"`{name}` routes tokens to experts, and {why} (a capacity for the whole batch, a balancing loss that "
                "is a product of means): over replicas that would be another computation than in one process. "
                "`expert_balance='replica'` says that each replica's own is meant, as in DDP; or use one replica and "
                "`expert_parallel_size=1`, or a capacity for each sequence, or set what causes it to 0."
            )

    def _unlike(self, module: nn.Module) -> str:
        """Why a module cannot be shared out, whatever it computes."""
        names = self._names[id(module)]
        if len(names) > 1:
            return f"it is used under several names ({', '.join(f'`{name}`' for name in names)})"
        if any(type(parameter) is not nn.Parameter for parameter in module.parameters()):
            return "its parameters are of a class of their own"
        return ""


def _not_apart(router: nn.Module, experts: nn.Module) -> str:
    """Why experts of a list are not modules of their own."""
    each = [[id(parameter) for parameter in expert.parameters()] for expert in experts_of(experts)]
    beside = sum(1 for _ in router.parameters()) - sum(1 for _ in experts.parameters())
    if len({number for own in each for number in own}) != sum(map(len, each)) or beside < 1:
        return "its experts have parameters in common"
    if any(True for _ in experts.buffers()):
        return "its experts have buffers, which would be those of one rank's tokens"
    return ""


def _cut_sized(*_: object) -> str:
    return "each of its products is a module of its own"


def _cut_stacked(module: nn.Module, name: str, owners: Owners, table: ShardTable, here: InnerCut | None) -> None:
    def spec(leaf: str, shape: torch.Size) -> ShardSpec:
        if here is None:
            each = shape[0] // owners.experts  # 1 where experts have a dim of their own
            return ShardSpec.along(shape, 0, [(owners.first * each, (owners.first + owners.local) * each)])
        return with_block(here.spec(leaf, (owners.local, *shape[1:])), shape[0], owners.first)

    own = {
        leaf: ParameterSharding(spec(leaf, parameter.shape), of_experts=True)
        for leaf, parameter in module.named_parameters()
    }
    _apply(module, name, own, owners, table)


def _cut_one(
    expert: nn.Module, name: str, number: int, owners: Owners, table: ShardTable, inner: InnerCut | None
) -> None:
    """Keep one expert of a list, or a part of it, on the rank that holds it, and nothing of it on the others."""
    is_here = owners.first <= number < owners.first + owners.local
    own = {}
    for leaf, parameter in expert.named_parameters():
        nothing = ShardSpec(tuple(parameter.shape), (0, *parameter.shape[1:]), ())
        shape = tuple(parameter.shape)
        here = ShardSpec.whole(shape) if inner is None else inner.spec(leaf, shape)
        own[leaf] = ParameterSharding(here if is_here else nothing, of_experts=True)
    _apply(expert, name, own, owners, table)


def _apply(module: nn.Module, name: str, own: dict[str, ParameterSharding], owners: Owners, table: ShardTable) -> None:
    """Give all ranks the values of the first one, then leave each its part."""
    for leaf in own:
        parameter = module.get_parameter(leaf)
        if not parameter.is_meta:
            values = parameter.data.contiguous()
            raw_broadcast(values, dist.get_global_rank(owners.group, 0), owners.group)
            parameter.data = values
    apply_specs(module, own)
    table.update({f"{name}.{leaf}" if name else leaf: sharding for leaf, sharding in own.items()})


def _indivisible(name: str, count: int, size: int) -> str:
    fitting = [str(other) for other in range(1, count + 1) if count % other == 0]
    return (
        f"`{name}` has {count} experts, not divisible by `expert_parallel_size={size}`; use "
        f"`expert_parallel_size={', '.join(fitting[:-1])} or {fitting[-1]}`."
    )


def _not_gathered(name: str) -> str:
    return (
        f"`expert_dispatch='all_gather'` gives all ranks all tokens, but the experts of `{name}` are called with the "
        "rows that are meant for each, and not with tokens, numbers of experts, and weights; use "
        "`expert_dispatch='all_to_all'`."
    )


def _none_found(module: nn.Module, report: ExpertReport, size: int, parts: int) -> str:
    seen = "".join(f" `{name}` looks like experts, but {why}." for name, why in report.whole.items())
    if not seen:
        named = ((name, type(child).__name__) for name, child in module.named_modules())
        called = next((each for each in named if "expert" in each[1].lower()), None)
        seen = f" `{called[0]}` is called {called[1]}, but is none of those that can be." if called else ""
    name, value = ("expert_parallel_size", size) if size > 1 else ("expert_tensor_parallel_size", parts)
    return (
        f"`{name}={value}` shares out experts, but none were found that can be.{seen} Experts are modules "
        "with parameters `[experts, ...]` and a `forward(hidden, index, weights)`, or a list of modules that are "
        f"alike, called by one that has a router beside them; use `{name}=1`."
    )
