"""Finds the experts of a module, tries them on a copy, and leaves each rank its own."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from torch import nn

from lightning_megatron.experts.by_plan import EXPERTS, WHOLE, ExpertPlan, Plan
from lightning_megatron.experts.exchange.folding import Folding
from lightning_megatron.experts.exchange.sending import Owners
from lightning_megatron.experts.exchange.taking_part import Calls
from lightning_megatron.experts.kinds.blocks import BlockedExperts, blocked_experts, cut_blocks, try_blocks
from lightning_megatron.experts.kinds.gathered import gathered_dims, leave_gathered
from lightning_megatron.experts.kinds.inner_cut import InnerCut
from lightning_megatron.experts.kinds.leaving import leave_one, leave_stacked
from lightning_megatron.experts.kinds.listed import ListedExperts, experts_of, lead_list, listed_experts, routes
from lightning_megatron.experts.kinds.probe import cut_one, cut_stacked, draws, mixes_samples, try_listed, try_stacked
from lightning_megatron.experts.kinds.sized import SizedExperts, sized_experts, try_sized
from lightning_megatron.experts.kinds.stacked import StackedExperts, stacked_along, stacked_experts
from lightning_megatron.experts.kinds.twin import lead
from lightning_megatron.experts.refused import indivisible, none_found, not_experts, not_gathered
from lightning_megatron.experts.routers import ABOVE
from lightning_megatron.layers import MoE
from lightning_megatron.layers.table import ShardTable
from lightning_megatron.mesh.marks import Marks
from lightning_megatron.mesh.mesh import ExpertGroups
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
        dims: of its parameters, by their names in it, along which they are shared out, where weights travel instead of
            rows.
        router: name of the module that calls experts of a list.
    """

    name: str
    count: int
    cut: Callable[[Owners, ShardTable], None]
    gathers: bool = False
    dims: Mapping[str, int] | None = None
    router: str | None = None


@dataclass
class ExpertReport:
    """Report of what is split over expert ranks.

    Attributes:
        table: how this rank holds each of the experts' parameters.
        split: name of each module of experts -> how many experts it has; 0 where weights are gathered for each call.
        whole: name of what looks like experts but stays whole -> why.
    """

    table: ShardTable = field(default_factory=dict)
    split: dict[str, int] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)

    def explain(self) -> str:
        """The report in words: which modules were split, and why others were not."""
        lines = [f"`{name}`: {f'{count} experts' if count else 'weights'}" for name, count in self.split.items()]
        return "; ".join([*lines, *(f"`{name}` stays whole: {why}" for name, why in self.whole.items())])


class ExpertSplit:
    """Shares out the experts of a module, in two steps: layers around them may be split in between.

    Args:
        module: whole, the same on every rank except for the values of its parameters.
        size: over how many ranks.
        parts: over how many further ones each expert is cut.
        per_replica: whether what a module makes of a whole batch is meant to be that of each replica.
        gathers: whether all ranks get all tokens, instead of rows for their experts.
        plan: what the user says about experts; see :mod:`.by_plan`.

    Attributes:
        report: what was found.

    Raises:
        ValueError: there are no experts that can be shared out, or their number is not divisible by the ranks; or they
            cannot be cut; or the plan says what is not so.
    """

    def __init__(
        self,
        module: nn.Module,
        size: int,
        parts: int = 1,
        *,
        per_replica: bool = False,
        gathers: bool = False,
        plan: Plan = "auto",
    ) -> None:
        self._module, self._parts, self._gathers, self.report = module, parts, gathers, ExpertReport()
        asked = ExpertPlan.of(plan, module)
        self._found = _Finder(module, size, parts, self.report, per_replica, asked).found()
        for mixture in self._found:
            if mixture.dims is None and mixture.count % size:
                raise ValueError(indivisible(mixture.name, mixture.count, size))
            if gathers and mixture.dims is None and not mixture.gathers:
                raise ValueError(not_gathered(mixture.name))
            self.report.split[mixture.name] = mixture.count
        if not self._found:
            raise ValueError(none_found(module, self.report.whole, size, parts))

    def cut(self, groups: ExpertGroups, *, on_shards: Collection[str] = ()) -> ExpertReport:
        """Leave each rank its own, in place. Collective over the ranks of a stage.

        Values of the experts become those of rank 0 of each group.

        Args:
            groups: of this rank.
            on_shards: names of parameters that act on a part of a replica's tokens only (sequence parallelism); what
                other experts are given, all tensor ranks have.
        """
        calls = Marks.of(self._module).put(Calls(groups.group))
        Marks.of(self._module).put(calls.joint)
        for mixture in self._found:
            parameters = self._module.get_submodule(mixture.name).named_parameters(mixture.name)
            sees_some = any(name in on_shards for name, _ in parameters)
            if mixture.dims is not None:
                alike = 1 if sees_some or groups.tensor is None else groups.tensor.size()
                experts = self._module.get_submodule(mixture.name)
                leave_gathered(experts, mixture.name, mixture.dims, calls, alike, self.report.table)
                continue
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
        plan: what the user says.
    """

    def __init__(
        self, module: nn.Module, size: int, parts: int, report: ExpertReport, per_replica: bool, plan: ExpertPlan
    ) -> None:
        self._module, self._size, self._report, self._per_replica = module, size, report, per_replica
        self._parts, self._plan = parts, plan
        self._tried: dict[object, Any] = {}
        self._names: dict[int, list[str]] = {}
        self._shared: Counter[int] = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        for name, child in module.named_modules(remove_duplicate=False):
            self._names.setdefault(id(child), []).append(name)

    def found(self) -> list[Found]:
        """All mixtures that can be shared out."""
        candidates: list[Found | None] = []
        inside: dict[nn.Module, str] = {}  # of experts; a mixture in one of them is on one rank as a whole
        for name, child in self._module.named_modules():
            if child in inside:
                self._refuse_inside(name, inside[child])
                continue
            kind = self._plan.kinds.get(name, "")
            found = self._as_planned(name, child, kind) if kind else self._by_structure(name, child)
            candidates.append(found)
            if found is not None or kind or self._count(name, child):
                inside |= dict.fromkeys(child.modules(), name)
        return self._in_turn([each for each in candidates if each is not None])

    def _count(self, name: str, child: nn.Module) -> int:
        """How many experts a module has stacked, by the plan or by what it looks like; 0 for none."""
        dims = self._plan.dims_in(name) if name in self._plan.kinds else {}
        if dims:
            return stacked_along(child, dims)
        return stacked_experts(child) or blocked_experts(child) or sized_experts(child)

    def _by_structure(self, name: str, child: nn.Module) -> Found | None:
        count = self._count(name, child)
        return self._stacked(name, child, count) if count else self._listed(name, child)

    def _as_planned(self, name: str, child: nn.Module, kind: str) -> Found | None:
        """The kind that the plan gives a module.

        Raises:
            ValueError: it is not.
        """
        if kind == WHOLE:
            self._report.whole[name] = "`expert_parallel_plan` says so"
            return None
        if kind == EXPERTS:
            found = self._by_structure(name, child)
            if found is None:
                raise ValueError(not_experts(name, self._report.whole.get(name, "")))
            return found
        why = self._unlike(child) if name else "it is the whole module"
        dims = gathered_dims(name, child, self._plan.dims_in(name), self._size, why, self._parts)
        return Found(name, 0, _nothing_more, dims=dims)

    def _stacked(self, name: str, experts: nn.Module, count: int) -> Found | None:
        why, width = self._unlike(experts), 0
        dims = self._plan.dims_in(name) if name in self._plan.kinds else {}
        blocked, sized = not dims and blocked_experts(experts), not dims and sized_experts(experts)
        parts = self._size if count % self._size == 0 else 1
        if not why and sized:
            why, width = self._try(experts, "", lambda copied: try_sized(copied, count, parts))
        elif not why and blocked:
            why, _ = self._try(experts, "", lambda copied: (try_blocks(copied, count, parts), 0))
        elif not why and parts > 1:
            why, _ = self._try(experts, "", lambda copied: (try_stacked(copied, count, parts, dims), 0))
        if not why and name:
            block = self._module.get_submodule(parent(name))
            if not list(self._names[id(block)])[1:] and block is not self._module:
                self._refuse_mixing(parent(name), block)
        if why:
            self._report.whole[name] = why
            return None
        stacked = _cut_planned if any(dims.values()) else cut_stacked
        cutting = _cut_sized if sized else cut_blocks if blocked else stacked
        inner = self._inner(name, experts, lambda copied: cutting(copied, count, self._parts))

        def cut(owners: Owners, table: ShardTable) -> None:
            here = None if inner is None else inner.at(owners.part)
            leave_stacked(experts, name, owners, table, here, dims)
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
        kept = (self._unlike(each) for each in experts_of(experts))
        why = self._unlike(router, alone=False) or next(filter(None, kept), "") or _not_apart(router, experts)
        if not why:
            why, tried = self._try(router, path, lambda copied: try_listed(copied, path))
            widths = tried.get(path, widths)
        if why:
            self._report.whole[name] = why
            return None
        self._refuse_mixing(above, router)
        first = experts_of(experts)[0]
        inner = self._inner(name, first, lambda copied: cut_one(copied, widths[0], self._parts))

        def cut(owners: Owners, table: ShardTable) -> None:
            own = None if inner is None else inner.at(owners.part)
            for number, expert in enumerate(experts_of(experts)):
                leave_one(expert, self._names[id(expert)][0], number, owners, table, own)
            lead_list(router, ListedExperts(above, path, widths, owners, own))

        return Found(name, count, cut, router=above)

    def _in_turn(self, found: list[Found]) -> list[Found]:
        """Mixtures in the order in which their routers call them; of lists that cannot take turns the largest."""
        lists = Counter(each.router for each in found if each.router is not None)
        for above in [router for router, count in lists.items() if count > 1]:
            router = self._module.get_submodule(above)
            together = {each.name[len(above) :].lstrip("."): each for each in found if each.router == above}
            paths = sorted(together, key=lambda path: sum(p.numel() for p in router.get_submodule(path).parameters()))
            trial = functools.partial(_try_lists, paths=tuple(paths))
            why, order = self._try(router, ", ".join(paths), trial)
            if why:
                for each in paths[:-1]:
                    self._report.whole[together[each].name] = f"of the lists of `{above}` together, {why}"
            turns = paths[-1:] if why else list(order)
            found = [*(each for each in found if each.router != above), *(together[path] for path in turns)]
        return found

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

    def _refuse_inside(self, name: str, around: str) -> None:
        if name in self._plan.kinds and self._plan.kinds.get(around) != self._plan.kinds[name]:
            raise ValueError(
                f"`expert_parallel_plan` names `{name}`, which lies in `{around}`, and that is handled as a whole; "
                "name one of them."
            )

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

    def _unlike(self, module: nn.Module, *, alone: bool = True) -> str:
        """Why a module cannot be shared out, whatever it computes; ``alone`` if no other may have its parameters."""
        names = self._names[id(module)]
        if len(names) > 1:
            return f"it is used under several names ({', '.join(f'`{name}`' for name in names)})"
        if any(type(parameter) is not nn.Parameter for parameter in module.parameters()):
            return "its parameters are of a class of their own"
        if alone and any(self._shared[id(parameter)] > 1 for parameter in module.parameters()):
            return "it shares parameters with another module"
        return ""


def _try_lists(copied: nn.Module, paths: tuple[str, ...]) -> tuple[str, dict[str, tuple[int, int]]]:
    return try_listed(copied, *paths)


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


def _cut_planned(*_: object) -> str:
    return "`expert_parallel_plan` says that other dims than the first count its experts"


def _nothing_more(*_: object) -> None:
    """Do nothing more: for experts whose weights are gathered, :func:`leave_gathered` is enough."""
