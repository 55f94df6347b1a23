"""Experts in a list, called one by one by the module that routes to them.

People write loops over experts in many ways: with or without tokens for each, once or once per choice, dense, by masks
or by capacity. None of them has to be understood. The router's module runs twice::

    look      its forward, with experts that note what they are given and answer zeros; all traces are put back
    send      what was noted goes to the ranks that hold the experts, and comes back computed: one exchange
    run       its forward, with experts that answer what came back

That is the same computation as long as what an expert is given does not depend on what another one has answered, and
every expert treats its rows one by one; a trial on a copy finds out both. Gradients of what experts were given flow
through the first forward, all others through the second.

A module may have several lists: one for each group of experts, or one of their first layers and one of their second
ones. Then they take turns, in the order in which it calls them: each has a look of its own, in which the lists before
it answer what came back, so what a list is given may depend on those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_megatron.experts.exchange.rows_here import rows_here, shown_as
from lightning_megatron.experts.exchange.sending import Owners
from lightning_megatron.experts.exchange.taking_part import Told
from lightning_megatron.experts.kinds.inner_cut import InnerCut
from lightning_megatron.experts.kinds.twin import Led, is_elsewhere, lead
from lightning_megatron.mesh.marks import Marks
from lightning_megatron.pipeline.elsewhere.undo import unchanged


def listed_experts(module: nn.Module) -> int:
    """Number of experts that a list of modules appears to hold; 0 if they are not alike."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) or len(module) < 2:
        return 0
    experts = experts_of(module)
    if any(isinstance(expert, nn.ModuleList | nn.ModuleDict) for expert in experts):  # a list of lists is not called
        return 0
    kinds = {(type(e), tuple((n, p.shape, p.dtype) for n, p in e.named_parameters())) for e in experts}
    return len(experts) if len(experts) > 1 and len(kinds) == 1 else 0


def experts_of(module: nn.Module) -> list[nn.Module]:
    """The experts of a list, in order: what has weights, here or on another rank, and no dropout beside them."""
    return [child for child in module.children() if child._parameters or child._modules]


def routes(module: nn.Module, experts: nn.Module, count: int) -> bool:
    """Whether a part of ``module`` other than its experts has one value per expert, as a router has."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    below = {id(parameter) for parameter in experts.parameters()}
    return any(has_one_for_each(p, count) for p in module.parameters() if id(p) not in below)


def has_one_for_each(parameter: nn.Parameter, count: int) -> bool:
    """Whether a parameter has a value or a row for each of ``count`` experts; a kernel's width is no number of them."""
    return count in (parameter.shape[:1] if parameter.ndim > 3 else parameter.shape)


@dataclass
class Noted:
    """Inputs of the experts in a forward, in the order of the calls.

    Attributes:
        expert: number of the expert of each call.
        given: their inputs; this rank's rows of those that are split over context ranks.
        shown: the same at global shape, where rows are counted.
        answers: the outputs to return; empty while inputs are noted.
        at: number of the next call.
        checks: whether inputs must equal the noted ones in value, and not only in shape.
    """

    expert: list[int] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)
    shown: list[Tensor] = field(default_factory=list)
    answers: list[Tensor] = field(default_factory=list)
    at: int = 0
    checks: bool = False


class Differs(RuntimeError):
    """The two forwards give their experts different inputs."""


class ListedExperts:
    """Takes over the calls of one list of experts.

    Args:
        name: of the module that routes tokens to them, for messages.
        path: of the list in it.
        widths: size of the last dim of what experts take, and of what they give.
        owners: who has which experts.
        inner: how each expert is split, if it is.

    Attributes:
        sees: told the experts [n] of the rows of each call, if anybody asks.
    """

    checks = False
    """Whether the second forward's tensors are compared with the first's, and not their shapes only."""

    def __init__(
        self, name: str, path: str, widths: tuple[int, int], owners: Owners, inner: InnerCut | None = None
    ) -> None:
        self.name, self.path, self._widths, self._owners, self._inner = name, path, widths, owners, inner
        self._noted: Noted | None = None
        self._computes = self._looks = False
        self.sees: Callable[[Tensor], None] | None = None

    @property
    def count(self) -> int:
        """How many experts all ranks have."""
        return self._owners.experts

    def send(self, module: nn.Module, noted: Noted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Compute the answers to what experts were given; collective over the ranks that share them.

        Args:
            module: with the router.
            noted: given the answers.
            args: of the call.
            kwargs: likewise.

        Returns:
            All answers, ``[n, width]``.
        """
        sizes = [given[..., 0].numel() for given in noted.given]
        rows = self._rows(noted, args, kwargs)
        expert = torch.tensor(noted.expert, device=rows.device, dtype=torch.long)
        expert = expert.repeat_interleave(torch.tensor(sizes, device=rows.device, dtype=torch.long))
        if self.sees is not None:
            self._tell(self.sees, noted)
        found = self._send(module, rows, expert, noted.expert)
        parts = list(zip(noted.given, found.split(sizes), strict=True)) if sizes else []
        noted.answers = [part.clone().view(*given.shape[:-1], self._widths[1]) for given, part in parts]
        return found

    def check_all_called(self, noted: Noted) -> None:
        """Refuse a forward that has not asked for all answers.

        Raises:
            Differs: it has not.
        """
        if noted.at != len(noted.answers):
            raise self._differs(f"{len(noted.answers)} calls of experts, then {noted.at}")

    def _tell(self, sees: Callable[[Tensor], None], noted: Noted) -> None:
        """Report which experts the rows of each call go to."""
        for number, given in zip(noted.expert, noted.shown, strict=True):
            like = rows_here(given)[..., 0]
            sees(shown_as(given, torch.full_like(like, number, dtype=torch.long).unsqueeze(-1)))

    def _send(self, module: nn.Module, rows: Tensor, expert: Tensor, called: list[int]) -> Tensor:
        """The experts' output for rows [n, width] of experts [n], and that of those that are called without rows."""
        first = self._owners.first
        mine = self.experts(module)[first : first + self._owners.local]

        def compute(arrived: Tensor, local: Tensor, told: Told) -> Tensor:
            return self.computed(mine, arrived, local, told.of_experts, told.called)

        folding = self._owners.folding
        return folding.whole(self._owners.send(folding.own(rows), folding.own(expert), compute, called), len(rows))

    def experts(self, module: nn.Module) -> list[nn.Module]:
        """The experts of the module, in order."""
        return experts_of(module.get_submodule(self.path))

    def computed(
        self, experts: list[nn.Module], rows: Tensor, expert: Tensor, counts: list[int], called: list[bool]
    ) -> Tensor:
        """Results of these experts for rows, ``[n, width], [n] -> [n, other width]``; those not called do not run.

        Args:
            experts: the experts.
            rows: for them.
            expert: their numbers, for each row.
            counts: how many rows each has.
            called: whether each is called, with rows or without.
        """
        found, order = [], expert.argsort(stable=True)
        with self._computing():
            for number, part in enumerate(rows[order].split(counts)):
                if called[number]:
                    with nullcontext() if self._inner is None else self._inner.runs(experts[number]):
                        found.append(experts[number](part))
        if not found:
            return rows.sum(1, keepdim=True).expand(len(rows), self._widths[1])  # no rows, but a part of the graph
        made = torch.cat(found)
        return made.new_empty(made.shape).index_copy(0, order, made)

    def _rows(self, noted: Noted, args: Any, kwargs: Any) -> Tensor:
        if noted.given:
            return torch.cat([given.reshape(-1, given.shape[-1]) for given in noted.given])
        first = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        dtype = first.dtype if first.is_floating_point() else torch.get_default_dtype()
        return torch.zeros(0, self._widths[0], device=first.device, dtype=dtype)

    def call(self, module: nn.Module, number: int, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answer a call of expert ``number``.

        Raises:
            RuntimeError: it is called with anything but one tensor, or from outside of its router's forward.
        """
        if self._computes:
            return own(*args, **kwargs)
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            raise RuntimeError(
                f"experts of `{self.name}` are called with other than one tensor, so they cannot be shared out; use "
                "`expert_parallel_size=1`."
            )
        shown, noted = args[0], self._noted
        given = rows_here(shown)
        if noted is None:
            raise RuntimeError(
                f"an expert of `{self.name}` was called outside of that module's forward, in which all ranks take "
                "part; call it there, or use `expert_parallel_size=1`."
            )
        if self._looks:
            noted.expert.append(number)
            noted.given.append(given)
            if self.sees is not None:
                noted.shown.append(shown)
            zeros = given.new_zeros(*given.shape[:-1], self._widths[1], dtype=self._dtype_of(module, given))
            return shown_as(shown, zeros)
        if noted.at >= len(noted.answers) or noted.expert[noted.at] != number:
            raise self._differs("experts are called in another order")
        before, answer = noted.given[noted.at], noted.answers[noted.at]
        noted.at += 1
        if before.shape != given.shape or (noted.checks and not torch.equal(before, given)):
            raise self._differs("an expert is given what another one has answered, or numbers drawn anew")
        return shown_as(shown, answer)

    def _differs(self, how: str) -> Differs:
        return Differs(
            f"`{self.name}` calls its experts otherwise when it runs again ({how}), so they cannot be shared out; use "
            "`expert_parallel_size=1`."
        )

    def _dtype_of(self, expert: nn.Module, given: Tensor) -> torch.dtype:
        """Dtype of what experts answer, which autocast and their own code decide on."""
        parameter = next(expert.parameters(), given)
        kind = given.device.type
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return torch.promote_types(parameter.dtype, given.dtype)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        before, self._computes = self._computes, True
        try:
            yield
        finally:
            self._computes = before

    @contextmanager
    def following(self, noted: Noted, *, looks: bool) -> Iterator[None]:
        """Around a forward of the router's module: note what experts are given, or answer from the notes."""
        before = self._noted, self._looks
        self._noted, self._looks, noted.at = noted, looks, 0
        try:
            yield
        finally:
            self._noted, self._looks = before


class ListsInTurn:
    """Takes over the calls of a module that routes tokens to lists of experts.

    Args:
        lists: in the order of their calls.
    """

    def __init__(self, *lists: ListedExperts) -> None:
        self.lists = list(lists)

    def run(self, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of the router's module.

        Raises:
            Differs: a forward calls experts otherwise than the one before.
        """
        if is_elsewhere(module, (args, kwargs)):
            with self._following([Noted() for _ in self.lists], 0):
                return own(*args, **kwargs)
        noted: list[Noted] = []
        found = []
        for turn, listed in enumerate(self.lists):
            noted = [*noted[:turn], *(Noted(checks=other.checks) for other in self.lists[turn:])]
            with unchanged(module, (*args, *kwargs.values())), _same_draws(args), self._following(noted, turn):
                own(*args, **kwargs)
            found.append(listed.send(module, noted[turn], args, kwargs))
        with self._following(noted, len(noted)):
            output = own(*args, **kwargs)
        for listed, notes in zip(self.lists, noted, strict=True):
            listed.check_all_called(notes)
        for answers in found:
            output = _joined(output, answers)
        return output

    @contextmanager
    def _following(self, noted: list[Noted], answered: int) -> Iterator[None]:
        """Around a forward in which the first lists answer, and the others note what they are given."""
        with ExitStack() as stack:
            for turn, (listed, notes) in enumerate(zip(self.lists, noted, strict=True)):
                stack.enter_context(listed.following(notes, looks=turn >= answered))
            yield


class OneExpert:
    """Takes over the calls of one expert of a list.

    Args:
        listed: takes over those of the module that calls it.
        number: of the expert.
    """

    def __init__(self, listed: ListedExperts, number: int) -> None:
        self._listed, self._number = listed, number

    def run(self, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`ListedExperts`."""
        return self._listed.call(module, self._number, own, args, kwargs)


def lead_list(module: nn.Module, listed: ListedExperts) -> None:
    """Let ``listed`` answer the calls of ``module`` and of its experts, after lists that do so already."""
    led = Marks.of(module).get(Led)
    if led is not None and isinstance(led.leader, ListsInTurn):
        led.leader.lists.append(listed)
    else:
        lead(module, ListsInTurn(listed))
    for number, expert in enumerate(listed.experts(module)):
        lead(expert, OneExpert(listed, number))


def _same_draws(args: Any) -> AbstractContextManager[None]:
    """Context of the first forward, after which the second one draws the same random numbers."""
    device = next((leaf.device for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)), torch.device("cpu"))
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _joined(output: Any, found: Tensor) -> Any:
    """``output`` with the exchange in its graph, also on a rank whose tokens go to no expert."""
    if not found.requires_grad:
        return output
    leaves, spec = pytree.tree_flatten(output)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaves[place] = leaf + found[:0].sum().to(leaf.dtype)
            break
    return pytree.tree_unflatten(leaves, spec)
