"""Finds parameters outside of the layers that act on sequence shards inside of them.

A condition or a gate that the layers are given, or code between two layers, acts on a part of the tokens on every rank:
the gradients of what it was computed from are partial sums, like those of the layers' own parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_megatron.mesh.parts.names import lies_in, parent
from lightning_megatron.parallelize.plan.blueprint import Blueprint
from lightning_megatron.parallelize.plan.styles import Style
from lightning_megatron.parallelize.reading.trace import Nodes, Trace, relative, tensors_left
from lightning_megatron.parallelize.trial.tokens import answer, first_tensor, mixed, root_of


def partial_outside(blueprint: Blueprint, trace: Trace, layers: list[str], covered: Callable[[str], bool]) -> set[str]:
    """Parameters outside of the layers that act on parts of the tokens: by arguments, between layers, by attributes.

    They are found in the autograd graph between the first layer's hidden state and the last layer's output, in a run in
    which regions, which see all tokens, return recorded outputs.

    Args:
        blueprint: regions and styles of the traced module.
        trace: its trace.
        layers: names of the layers of the trunk.
        covered: whether a parameter of that name belongs to a layer of the trunk.

    Returns:
        Their names; the gradient of each is a partial sum.

    Raises:
        ValueError: one of them also acts on all of the tokens, or is itself split.
    """
    root = root_of(trace, layers)
    if root is None or root in layers:
        return set()
    ends = [region.row for region in blueprint.regions if lies_in(region.row, root)]
    ends += [name for name, style in blueprint.styles.items() if style is Style.HEADS and name in trace.calls]
    answers = {n: trace.calls[n].output for n in ends if any(lies_in(n, layer) for layer in layers)}
    inside, outside, states, last = Nodes(), Nodes(), list[Any](), list[Any]()

    def first(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        inside.writes("hidden", hidden)
        states.append(hidden.grad_fn)

    def end(part: nn.Module, args: Any, output: Any) -> None:
        outside.writes("output", output)
        last.append(first_tensor(output).grad_fn)

    def prepare(copied: nn.Module) -> None:
        answer(copied, root, answers)
        for parameter in copied.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        copied.get_submodule(relative(layers[0], root)).register_forward_pre_hook(first, with_kwargs=True)
        copied.get_submodule(relative(layers[-1], root)).register_forward_hook(end)

    with torch.enable_grad():
        copied, output = trace.replay(root).run(prepare)
    results = [x.grad_fn for x in tensors_left(copied, output)]
    partial = inside.reach([node for node in last if node is not None])[1]
    whole = outside.reach([node for node in (*states, *results) if node is not None])[1]
    return _only_partial(blueprint, trace, _named_in(copied, root), partial, whole, covered)


def _named_in(copied: nn.Module, root: str) -> dict[str, int]:
    """Name in the traced module -> id, of all parameters of a copy of ``root``; tied ones by each of their names."""
    found = copied.named_parameters(prefix=root, remove_duplicate=False)
    return {name: id(parameter) for name, parameter in found}


def _only_partial(
    blueprint: Blueprint,
    trace: Trace,
    names: dict[str, int],
    partial: set[int],
    whole: set[int],
    covered: Callable[[str], bool],
) -> set[str]:
    """Names of the uncovered parameters in ``partial``; refuses those whose gradient no sum over ranks makes whole."""
    found = {name for name, key in names.items() if key in partial and not covered(name)}
    gathered = set().union(*(trace.between.get(region.row, set()) for region in blueprint.regions))
    for name in sorted(found):
        if names[name] in whole or name in gathered or parent(name) in blueprint.styles:
            raise ValueError(mixed(name))
    return found
