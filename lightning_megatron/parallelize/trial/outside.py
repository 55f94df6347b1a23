"""Finds parameters outside of the layers that act on sequence shards inside of them.

A condition or a gate that the layers are given, or code between two layers, acts on a part of the tokens on every rank:
the gradients of what it was computed from are partial sums, like those of the layers' own parameters. So are those of
what column-parallel layers are given besides the hidden state, such as a table of relative positions that attention
projects like its keys: every rank has all of it, and a part of the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_megatron.mesh.parts.names import Parts, parent
from lightning_megatron.parallelize.plan.blueprint import Blueprint, Door
from lightning_megatron.parallelize.plan.styles import Style
from lightning_megatron.parallelize.reading.trace import Nodes, Trace, relative, tensors_left
from lightning_megatron.parallelize.trial.between_tokens import AllTokens
from lightning_megatron.parallelize.trial.mixed_gradients import mixed
from lightning_megatron.parallelize.trial.tokens import first_tensor, root_of


def partial_outside(
    blueprint: Blueprint,
    trace: Trace,
    layers: list[str],
    doors: Mapping[str, Door | None],
    covered: Callable[[str], bool],
    *,
    apart: bool,
    mixing: Mapping[str, AllTokens],
) -> set[str]:
    """Parameters outside of the layers whose gradients are partial sums where the layers have parts of the tokens.

    Args:
        blueprint: regions and styles of the traced module.
        trace: its trace.
        layers: names of the layers of the trunk.
        doors: by row-parallel layer of the trunk, where the tokens are gathered for its region.
        covered: whether a parameter of that name belongs to a layer of the trunk.
        apart: whether each layer gathers its output, so that code between them acts on all tokens, and sums the
            gradients of what it is given.
        mixing: modules in the layers that get all tokens.

    Returns:
        Their names.

    Raises:
        ValueError: one of them also acts on all of the tokens, or is itself split; or the tokens are gathered by a
            column-parallel layer that is given something else than tokens too.
    """
    root = root_of(trace, layers)
    if root is None or root in layers:
        return set()
    run = _Run(blueprint, layers, root, doors, mixing)
    with torch.enable_grad():
        copied, output = trace.replay(root).run(run.prepare)
    names = _names_in(copied, root)
    on_tokens, to_columns, past = names(run.on_tokens()), names(run.to_columns), names(run.past_columns())
    whole = set().union(*(trace.between.get(region.row, set()) for region in blueprint.regions))
    whole |= to_columns & (past - on_tokens)
    found = {name for name in on_tokens | to_columns if not covered(name)}
    if not apart:
        whole |= names(run.on_all([x.grad_fn for x in tensors_left(copied, output)]))
        whole |= {name for name in found if parent(name) in blueprint.styles}
    for name in sorted(found & whole):
        raise ValueError(mixed(name))
    return set() if apart else found


class _Run:
    """A run of the layers, and what the autograd graph tells of it.

    A layer's part of the tokens goes around its regions and into them, where all tokens are gathered and each rank has
    a part of the columns::

        hidden ──┬─ norm, scale, shift ─ gather [ columns ─ attention ─ row ] scatter ─┬─ next layer
                 └──────────────────────────────────────────────────────────────────┘

    Args:
        blueprint: regions and styles of the traced module.
        layers: names of the layers of the trunk.
        root: name of the module that is run.
        doors: see :func:`partial_outside`.
        mixing: likewise.

    Attributes:
        to_columns: ids of parameters that reach columns after the gather.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        layers: list[str],
        root: str,
        doors: Mapping[str, Door | None],
        mixing: Mapping[str, AllTokens],
    ) -> None:
        self._layers, self._root, self._doors = layers, root, doors
        self._regions = [region for region in blueprint.regions if region.row in doors]
        inside = Parts(layers)
        self._mixing = mixing
        self._heads = [n for n, style in blueprint.styles.items() if style is Style.HEADS and parent(n) in inside]
        self._shards, self._gathered, self._past, self._outside = Nodes(), Nodes(), Nodes(), Nodes()
        self._into, self._hidden, self._last = list[Any](), list[Any](), list[Any]()
        self.to_columns = set[int]()

    def prepare(self, copied: nn.Module) -> None:
        """Put hooks on a copy of the module."""
        for parameter in copied.parameters():
            parameter.requires_grad_(parameter.is_floating_point())

        def part(name: str) -> nn.Module:
            return copied.get_submodule(relative(name, self._root))

        part(self._layers[0]).register_forward_pre_hook(self._first, with_kwargs=True)
        part(self._layers[-1]).register_forward_hook(self._end)
        for region in self._regions:
            door = self._doors[region.row]
            if door is not None:
                part(door[0]).register_forward_pre_hook(self._entering(door[1]), with_kwargs=True)
            for name in region.columns:
                part(name).register_forward_hook(self._column(name, gathers=door is None))
            part(region.row).register_forward_hook(self._leaving)
        for name in self._heads:
            part(name).register_forward_pre_hook(self._entering(None), with_kwargs=True)
            part(name).register_forward_hook(self._leaving)

        for name, tokens in self._mixing.items():
            part(name).register_forward_pre_hook(self._entering(tokens.given), with_kwargs=True)
            part(name).register_forward_pre_hook(_refusing_others(name, tokens), with_kwargs=True)
            part(name).register_forward_hook(self._leaving)

    def on_tokens(self) -> set[int]:
        """Ids of parameters that act on parts of the tokens: arguments, code between layers, attributes."""
        return _reached(self._shards, [*self._into, *self._last])

    def past_columns(self) -> set[int]:
        """Ids of those that act on the layers' output other than through columns."""
        return _reached(self._past, self._last)

    def on_all(self, results: Sequence[Any]) -> set[int]:
        """Ids of those that act on all tokens, before the first layer and after the last.

        Args:
            results: nodes of what the run left.
        """
        return _reached(self._outside, [*self._hidden, *results])

    def _first(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        self._hidden.append(hidden.grad_fn)
        if hidden.grad_fn is None:  # the module's own input: followed like a hidden state that was computed
            hidden = hidden.detach().requires_grad_().clone()
        for nodes in (self._shards, self._gathered, self._past):
            nodes.writes("hidden", hidden)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._outside.writes("output", output)
        self._last.append(first_tensor(output).grad_fn)

    def _entering(self, keys: Sequence[int | str] | None) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            found = [x for key, x in named.items() if isinstance(x, Tensor) and (keys is None or key in keys)]
            self._into.extend(x.grad_fn for x in found)
            self._gathered.writes("gathered", found)

        return hook

    def _column(self, name: str, *, gathers: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            node = first_tensor(args).grad_fn
            if not gathers:
                self.to_columns |= _reached(self._gathered, [node])
            elif node is None or not self._past.reach([node])[0]:
                raise ValueError(
                    f"`sequence_parallel=True`: {name!r} gathers the tokens that it is called with, and is also called "
                    "with a tensor that does not come from the hidden state; turn sequence parallelism off."
                )
            else:
                self._into.append(node)
            self._past.writes("column", output)

        return hook

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        self._shards.writes("region", output)


def _refusing_others(name: str, tokens: AllTokens) -> Callable[..., None]:
    """A hook that refuses gradients of what a module is given beside the tokens: every rank has the whole of them."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        others = [leaf for key, x in named.items() if key not in tokens.given for leaf in tree_leaves(x)]
        if any(isinstance(x, Tensor) and x.requires_grad for x in others):
            raise ValueError(
                f"`sequence_parallel=True`: {name!r} mixes tokens, is not split, and is given something else with a "
                "gradient besides the hidden state; split it as well, or turn sequence parallelism off."
            )

    return hook


def _reached(nodes: Nodes, ends: Sequence[Any]) -> set[int]:
    return nodes.reach([node for node in ends if node is not None])[1]


def _names_in(copied: nn.Module, root: str) -> Callable[[set[int]], set[str]]:
    """From ids of parameters of a copy of ``root`` to names in the traced module; tied ones have each of theirs."""
    found = list(copied.named_parameters(prefix=root, remove_duplicate=False))
    return lambda ids: {name for name, parameter in found if id(parameter) in ids}
