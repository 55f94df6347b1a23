"""Experts stacked in one module: parameters ``[experts, ...]``, and the router's choice as an argument.

Most mixtures of Hugging Face are of this kind, and many of people's own::

    forward(hidden [T, h], index [T, k], weights [T, k]) -> [T, h]      y_t = Σ_k weights_tk · expert_index_tk(x_t)

Their own forward runs on the experts of a rank, one row per token and choice with weight 1; whatever it computes
(biases, clamps, another layout of weights, grouped products) is computed as it was written.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_megatron.experts.exchange.folding import Folding
from lightning_megatron.experts.exchange.rows_here import rows_here, rows_of, shown_as
from lightning_megatron.experts.exchange.sending import Compute, Owners
from lightning_megatron.experts.exchange.taking_part import Told
from lightning_megatron.experts.kinds.inner_cut import InnerCut
from lightning_megatron.experts.kinds.twin import is_elsewhere
from lightning_megatron.layers import Experts
from lightning_megatron.mesh.nested import on_filler
from lightning_megatron.mesh.replaced import Replacements

Made = Callable[[Callable[..., Any], Tensor, Tensor, Told], Tensor]
"""What the experts of a rank make of rows: given a forward, the rows, their experts' local numbers, and what the ranks
have told."""


def stacked_experts(module: nn.Module) -> int:
    """How many experts a module looks to have stacked in its parameters; 0 if it does not look like experts."""
    return has_stacks(module) or has_joint_stacks(module) if len(forward_arguments(module)) >= 3 else 0


def has_stacks(module: nn.Module) -> int:
    """How many things a module has stacked in its parameters, if it has nothing else; else 0."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    several = {parameter.shape[0] for parameter in own if parameter.dim() >= 2}
    below = any(True for child in module.children() for _ in child.parameters())
    if below or len(several) != 1 or any(p.dim() < 2 for p in own) or all(p.dim() < 3 for p in own):
        return 0
    count = several.pop()
    return count if count > 1 else 0


def stacked_along(module: nn.Module, dims: Mapping[str, int]) -> int:
    """How many experts a module has stacked along the dims that a plan gives, the first one where it gives none; 0 if
    its parameters do not agree on a number.
    """
    several = {parameter.shape[dims.get(leaf, 0)] for leaf, parameter in module.named_parameters() if parameter.dim()}
    count = several.pop() if len(several) == 1 else 0
    return count if count > 1 and len(forward_arguments(module)) >= 3 else 0


def has_joint_stacks(module: nn.Module) -> int:
    """How many experts a module says it has, if all parameters in it are their matrices one below the other,
    ``[experts · width, ...]`` (DBRX); else 0.
    """
    shapes = [parameter.shape for parameter in module.parameters()]
    said = {value for name, value in vars(module).items() if "expert" in name and type(value) is int and value > 1}
    fits = [n for n in said if all(len(shape) > 1 and shape[0] > n and shape[0] % n == 0 for shape in shapes)]
    joint = shapes and len(fits) == 1 and not isinstance(module, nn.ModuleList | nn.ModuleDict)
    return fits[0] if joint else 0


def forward_arguments(module: nn.Module) -> list[str]:
    """Names of the arguments of a module's forward; none where its class has no such function, as a scripted one."""
    try:
        return list(inspect.signature(type(module).forward).parameters)[1:]
    except (AttributeError, TypeError, ValueError):
        return []


class Choice:
    """The three arguments of a call: hidden states, and which experts they go to with which weights.

    Args:
        values: the arguments, in the order of the forward.

    Attributes:
        index: ``[..., k]`` integers.
        hidden: ``[..., h]``.
        weights: ``[..., k]``.

    Raises:
        ValueError: they are no such three.
    """

    def __init__(self, values: list[Any]) -> None:
        whole = [place for place, value in enumerate(values) if isinstance(value, Tensor) and _is_index(value)]
        real = [place for place, value in enumerate(values) if isinstance(value, Tensor) and value.is_floating_point()]
        if len(values) != 3 or len(whole) != 1 or len(real) != 2:
            raise ValueError("is not called with hidden states, indices of experts and weights")
        self._places = self._in_order(values, real, whole[0])
        self.hidden, self.index, self.weights = (values[place] for place in self._places)
        self._dims, lead = self.index.dim(), self.hidden.shape[:-1]
        flat = self._dims == 2 and lead.numel() == len(self.index)
        if self.weights.shape != self.index.shape or not (lead == self.index.shape[:-1] or flat):
            raise ValueError(
                f"is called with hidden states {tuple(self.hidden.shape)}, indices {tuple(self.index.shape)} and "
                f"weights {tuple(self.weights.shape)}; it takes one weight per index, and indices for every token"
            )

    @staticmethod
    def _in_order(values: list[Any], real: list[int], index: int) -> tuple[int, int, int]:
        """Places of hidden states, indices and weights: the latter have the shape of the indices."""
        one, other = real
        if values[one].shape == values[index].shape != values[other].shape:
            one, other = other, one
        return one, index, other

    def emptied(self) -> Choice:
        """A choice of the same kind for no tokens, on its own."""
        none = copy.copy(self)
        for name in ("hidden", "index", "weights"):
            setattr(none, name, getattr(self, name).detach()[:0].clone())
        return none

    def here(self) -> Choice:
        """That of the tokens that are here, where context ranks split them: [.., tokens, h] -> [.., tokens here, h]."""
        some, given = copy.copy(self), self.hidden
        both, some.hidden = (self.index, self.weights), rows_here(given)
        if given.shape[:-1] != self.index.shape[:-1]:  # flat, while the hidden states are not
            both = tuple(each.reshape(*given.shape[:-1], -1) for each in both)
        some.index, some.weights = (rows_of(given, each) for each in both)
        return some

    def own(self, folding: Folding) -> Choice:
        """That of this rank's tokens, where several ranks have the same: [.., h] -> [tokens here, h]."""
        some = copy.copy(self)
        for name in ("hidden", "index", "weights"):
            setattr(some, name, folding.own(getattr(self, name).flatten(0, -2)))
        return some

    def of_rows(self, rows: Tensor, expert: Tensor) -> list[Tensor]:
        """Arguments of the same kind for rows [n, h] that go to one expert [n] each, with weight 1."""
        lead = (1,) * (self._dims - 2)
        given = {
            self._places[0]: rows.view(*lead, *rows.shape),
            self._places[1]: expert.to(self.index.dtype).view(*lead, -1, 1),
            self._places[2]: torch.ones_like(expert, dtype=self.weights.dtype).view(*lead, -1, 1),
        }
        return [given[place] for place in range(3)]


def _is_index(value: Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool


class LedExperts:
    """Leads the calls of one module of experts, of which this rank has some.

    Args:
        name: of the module, for messages.
        owners: who has which experts.
        inner: how each of them is cut, where it is.

    Attributes:
        count: how many experts all ranks have.
    """

    def __init__(self, name: str, owners: Owners, inner: InnerCut | None = None) -> None:
        self._name, self._owners, self.count, self._inner = name, owners, owners.experts, inner
        self._runs = self._answers = False

    def _sent(
        self,
        module: nn.Module,
        own: Callable[..., Any],
        rows: Tensor,
        expert: Tensor,
        made: Made,
    ) -> Tensor:
        """Results of all experts for rows, ``[n, h], [n] -> [n, h]``.

        Args:
            module: the module.
            own: its forward.
            rows: for experts.
            expert: numbers of their experts.
            made: see :data:`Made`.
        """

        beside = module.beside if isinstance(module, Experts) else None
        meanwhile = None if beside is None else beside.result
        return self._led(module, own, made, lambda run: self._owners.send(rows, expert, run, meanwhile=meanwhile))

    def _led(
        self,
        module: nn.Module,
        own: Callable[..., Any],
        made: Made,
        deliver: Callable[[Compute], Tensor],
    ) -> Tensor:
        """The result of ``deliver``, told how this rank's experts are run; the others as in :meth:`_sent`."""

        if is_parametrized(module) and "_twin_of" not in vars(type(module)):
            raise RuntimeError(
                f"`{self._name}` has its weights replaced while it is called (`torch.nn.utils.parametrize`, as "
                "PEFT's adapters do), by what knows of all experts, and this rank has some of them. Name the "
                'outermost module that does so in `expert_parallel_plan={pattern: "gathered"}`, whose weights are '
                "then whole when it is called; leave the experts out of the adapter; or use `expert_parallel_size=1`."
            )

        def compute(arrived: Tensor, local: Tensor, told: Told) -> Tensor:
            forward = own if self._runs else functools.partial(self._answer, module)
            cut = nullcontext() if self._inner is None else self._inner.runs(module)
            with with_experts(module, self._owners.experts, self._owners.local), cut:
                return made(forward, arrived, local, told)

        before, self._runs = self._runs, True
        try:
            return deliver(compute)
        finally:
            self._runs = before

    def _answer(self, module: nn.Module, *args: Any) -> Any:
        """The experts' own forward for rows of other ranks only, in a call of the module, as it is written."""
        self._answers = True
        try:
            return module(*args)
        finally:
            self._answers = False


class StackedExperts(LedExperts):
    """Of stacked experts that take hidden states, indices and weights."""

    def run(self, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call: send the rows to their experts, and weigh what comes back.

        Raises:
            ValueError: it is not called with hidden states, indices and weights.
        """
        if self._answers:
            return own(*args, **kwargs)
        bound = inspect.signature(own).bind(*args, **kwargs)
        bound.apply_defaults()
        try:
            choice = Choice(list(bound.arguments.values()))
        except ValueError as error:
            raise ValueError(
                f"`{self._name}` looks like stacked experts but {error}; use `expert_parallel_size=1`."
            ) from None
        if is_elsewhere(module, choice.hidden):
            return torch.zeros_like(choice.hidden)
        given, choice = choice.hidden, choice.here()
        lasting = choice.emptied()  # what computes outlives the call

        def made(forward: Callable[..., Any], arrived: Tensor, local: Tensor, _: Told) -> Tensor:
            return computed(forward, lasting, arrived, local)

        folding, hidden, mine = self._owners.folding, choice.hidden, choice.own(self._owners.folding)
        if self._owners.gathers:
            sent = mine.hidden, mine.index, mine.weights
            found = self._led(module, own, made, lambda run: self._owners.gather(*sent, run))
        else:
            found = mixed(mine, lambda rows, ids: self._sent(module, own, rows, ids, made))
        return shown_as(given, folding.whole(found, hidden.shape[:-1].numel()).view(*hidden.shape[:-1], -1))


def fill(module: nn.Module, generator: torch.Generator) -> None:
    """Draw a module's parameters; their values are none of the question of what it computes, and may be zero."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.3)


def in_turns(rows: Tensor) -> list[Tensor]:
    """Numbers of rows in two parts, in another order: every second one in each, so that no call of an expert with
    several rows is in one part alone, and an expert that looks at more than a row is found out.
    """
    return [rows.flip(0)[::2], rows.flip(0)[1::2]]


def computed(own: Callable[..., Any], choice: Choice, rows: Tensor, expert: Tensor) -> Tensor:
    """Results of the experts' own forward for rows, ``[n, h], [n] -> [n, h]``; n may be 0."""
    if len(rows):
        return own(*choice.of_rows(rows, expert)).flatten(0, -2)  # type: ignore[no-any-return]
    one = rows.new_zeros(1, rows.shape[1]) + rows.sum()  # gradients of the parameters are zeros then, and not None
    with on_filler:
        return own(*choice.of_rows(one, expert.new_zeros(1))).flatten(0, -2)[:0]  # type: ignore[no-any-return]


def mixed(choice: Choice, send: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """``Σ_k weights_tk · expert_index_tk(hidden_t)``, shaped as ``hidden``.

    Args:
        choice: the arguments of the call. Indices beyond the last expert mean none, as in Hugging Face.
        send: gives the experts' output for rows [n, h] and experts [n].
    """
    index, k = choice.index.reshape(-1), choice.index.shape[-1]
    hidden = choice.hidden.reshape(-1, choice.hidden.shape[-1])
    weighed = send(hidden.repeat_interleave(k, 0), index).view(len(hidden), k, -1) * choice.weights.reshape(-1, k, 1)
    return weighed.sum(1).to(choice.hidden.dtype).view(*choice.hidden.shape[:-1], -1)


@contextmanager
def with_experts(module: nn.Module, before: int, now: int) -> Iterator[None]:
    """Let the module's own code find as many experts as its parameters have here."""
    with Replacements() as replaced:
        for part in module.modules():
            for name, value in list(vars(part).items()):
                if "expert" in name and type(value) is int and value == before:
                    replaced.put(part, name, now)
        yield
