"""Checks that the code between split regions does not mix tokens, so that it can run on sequence shards.

Under sequence parallelism a layer sees ``s/t`` tokens, and only its regions see all tokens. An attention that the plan
leaves whole would silently attend within its shard. So each kind of layer runs once on the last tokens of the traced
input (for causal attention, the first tokens would not show a difference), with the recorded outputs of its regions,
cut to these tokens. This is what the last rank will see; the output must equal the last tokens of the traced output.

The same holds for gradients. A parameter that acts on sequence shards gets a partial gradient, a parameter that acts on
the whole sequence a whole one, and the sum over the ranks is right for the former only. Parameters that act on both are
refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_megatron.mesh.parts.names import lies_in, parent
from lightning_megatron.parallelize.plan.blueprint import Blueprint, Door, Region
from lightning_megatron.parallelize.plan.patterns import generalize
from lightning_megatron.parallelize.plan.styles import Style
from lightning_megatron.parallelize.reading.inputs import BATCH
from lightning_megatron.parallelize.reading.replay import fresh
from lightning_megatron.parallelize.reading.trace import Call, Trace, is_tagged, relative
from lightning_megatron.parallelize.trial.auxiliary import AuxiliaryValues, deviation
from lightning_megatron.parallelize.trial.readers import used_directly
from lightning_megatron.parallelize.trial.training import TOLERANCE


def check_layers(
    blueprint: Blueprint,
    trace: Trace,
    layers: list[str],
    doors: dict[str, Door | None],
    dim: int,
) -> None:
    """Run each kind of layer, and each kind of module at whose call the sequence is gathered, on part of the sequence.

    Args:
        blueprint: regions and styles of the traced module.
        trace: its trace.
        layers: names of the layers of the trunk.
        doors: per region, where the sequence is gathered (see `SequencePlan`); a door that does not work is replaced by
            None, in place.
        dim: dim of the sequence in the hidden state.

    Raises:
        ValueError: a layer mixes tokens outside its regions, or the code of a region needs tokens that it does not get.
    """
    check = _Check(trace, dim, _hidden(trace.calls[layers[0]]))
    for region in blueprint.regions:
        door = doors.get(region.row)
        if door is not None and not check.door_fits(door, region.row):
            doors[region.row] = None
    for layer in layers:
        answers: dict[str, Any] = {}
        for region in blueprint.regions:
            if lies_in(parent(region.row), layer):
                answers |= check.answers_of(region, doors[region.row])
        for name, style in blueprint.styles.items():
            if style is Style.HEADS and lies_in(parent(name), layer):
                answers[name] = check.part(trace.calls[name].output)
        check.layer(layer, answers)


def check_between(trace: Trace, layers: list[str], dim: int) -> None:
    """Run the code between the layers on part of the sequence; each layer returns its recorded output, cut likewise.

    Args:
        trace: the trace of the module.
        layers: names of the layers of the trunk.
        dim: dim of the sequence in the hidden state.

    Raises:
        ValueError: the input of a layer is not the last tokens of its recorded input, for example because a residual
            connection around the layers adds the hidden state from before the split.
    """
    root = root_of(trace, layers)
    if root is None or root in layers or any(trace.counts[name] > 1 for name in layers):
        return
    check = _Check(trace, dim, _hidden(trace.calls[layers[0]]))
    answers = {name: check.part(trace.calls[name].output) for name in layers[:-1]}
    answers[layers[-1]] = trace.calls[layers[-1]].output
    found: list[str] = []

    def prepare(copied: nn.Module) -> None:
        answer(copied, root, answers)
        for name in layers[1:]:
            hook = _noting_deviation(found, trace.calls[name], check.part(_hidden(trace.calls[name])))
            copied.get_submodule(relative(name, root)).register_forward_pre_hook(hook, with_kwargs=True)

    problem = ""
    try:
        with torch.no_grad():
            trace.replay(root).run(prepare)
    except Exception as error:  # the module's code may fail in any way on parts of different lengths
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    if problem or found:
        trunk, why = parent(layers[0]), problem or f"the input of {found[0]!r} deviates"
        raise ValueError(
            f"`sequence_parallel=True`: the code between the layers of {trunk!r} does not work on a part of the tokens "
            f"({why}), as where a residual connection goes around them; move it into the layers, or turn sequence "
            "parallelism off."
        )


def root_of(trace: Trace, layers: list[str]) -> str | None:
    """The module that was run and contains all of the layers, if there is one."""
    return next((name for name in trace.roots if all(lies_in(layer, name) for layer in layers)), None)


def _noting_deviation(found: list[str], call: Call, want: Tensor) -> Callable[..., None]:
    """A hook that notes a layer whose hidden state is not ``want``, or whose other tensors are not those recorded."""

    def hook(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        got = args[0] if args else kwargs["hidden_states"]
        pairs = zip(tree_leaves((args, kwargs)), tree_leaves((call.args, call.kwargs)), strict=False)
        others = [(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape]
        others = [(a, b) for a, b in others if a is not got and b.is_floating_point()]
        beside = any(deviation(a, b) > TOLERANCE.get(b.dtype, 1e-4) for a, b in others)
        if got.shape != want.shape or beside or deviation(got, want) > TOLERANCE.get(want.dtype, 1e-4):
            found.append(call.name)

    return hook


def mixed(name: str) -> str:
    """The message about a parameter whose whole gradient is no sum over ranks."""
    return (
        f"`sequence_parallel=True`: {name!r} acts on a part of the tokens in one place and on all of them in "
        "another, so that its gradient is neither whole nor a partial sum; turn sequence parallelism off."
    )


class _Check:
    """Replays parts of a traced module as the last rank of a tensor group would run them on its sequence shard."""

    def __init__(self, trace: Trace, dim: int, hidden: Tensor) -> None:
        self._trace = trace
        self._dim = dim
        self._shape = hidden.shape
        self._seen: dict[Any, str] = {}

    def part(self, value: Any) -> Any:
        """The last tokens of every hidden state in ``value``."""
        length = self._shape[self._dim]
        return tree_map(lambda x: _last_tokens(x, self._dim, length, length // 2), value)

    def answers_of(self, region: Region, door: Door | None) -> dict[str, Any]:
        """Recorded outputs of the modules of a region: all tokens inside, the last tokens at its end."""
        calls = self._trace.calls
        if door is None:
            inside = {name: calls[name].output for name in region.columns}
        elif lies_in(parent(region.row), door[0]):
            return {door[0]: self.part(calls[door[0]].output)}
        else:
            inside = {door[0]: calls[door[0]].output}
        return {**inside, region.row: self.part(calls[region.row].output)}

    def door_fits(self, door: Door, row: str) -> bool:
        """Whether a module that gets the whole sequence uses it for its region only (and adds no residual to it)."""
        if not lies_in(parent(row), door[0]):
            return True
        call = self._trace.calls[door[0]]
        whole = set(door[1])
        args = tuple(v if i in whole else self._shorter(v) for i, v in enumerate(call.args))
        kwargs = {k: v if k in whole else self._shorter(v) for k, v in call.kwargs.items()}
        return not self._difference(call, args, kwargs, {row: self.part(self._trace.calls[row].output)})

    def layer(self, name: str, answers: dict[str, Any]) -> None:
        """Check that the layer computes the last tokens of its output from those of its input.

        Raises:
            ValueError: it does not.
        """
        call = self._trace.calls[name]
        if call.args:
            args, kwargs = (self.part(call.args[0]), *call.args[1:]), call.kwargs
        else:
            args, kwargs = (), {**call.kwargs, "hidden_states": self.part(call.kwargs["hidden_states"])}
        problem = self._difference(call, args, kwargs, answers)
        if problem:
            raise ValueError(
                f"`sequence_parallel=True`: {name!r} mixes tokens outside what the plan splits ({problem}); split its "
                "attention as well, or turn sequence parallelism off."
            )

    def _shorter(self, value: Any) -> Any:
        """Cut a further argument that has the shape of the hidden state, because it comes from the residual stream."""
        return self.part(value) if isinstance(value, Tensor) and value.shape == self._shape else value

    def _difference(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], answers: dict[str, Any]) -> str:
        """The difference to the recorded output as text; empty if there is none. Modules of one kind run once."""
        kind = (generalize(call.name), type(call.module), tuple(generalize(name) for name in answers))
        if kind not in self._seen:
            self._seen[kind] = self._run(call, args, kwargs, answers)
        return self._seen[kind]

    def _run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], answers: dict[str, Any]) -> str:
        beside = AuxiliaryValues(self._trace.replay(call.name), self.part)
        try:
            beside.note()
            with torch.no_grad():
                copied, output = beside.replay.run(lambda x: answer(x, call.name, answers), args=args, kwargs=kwargs)
            got = first_tensor(output)
        except Exception as error:  # the module's code may fail in any way on a shorter sequence
            return f"{type(error).__name__}: {error}".splitlines()[0] + "; it may read the length outside its attention"
        want = first_tensor(self.part(call.output))
        if got.shape != want.shape:
            return f"its output has shape {tuple(got.shape)} instead of {tuple(want.shape)}"
        difference = deviation(got, want)
        if difference > TOLERANCE.get(want.dtype, 1e-4):
            return f"its output deviates by {difference:.1e}"
        whole = {name: self._trace.calls[name].output for name in answers}
        inside = functools.partial(answer, root=call.name, answers=whole)
        name = beside.over_all_tokens((args, kwargs), (copied, output), call.output, inside)
        return f"{name}, beside the hidden state, is computed over all tokens, as an auxiliary loss is" if name else ""


def _last_tokens(x: Any, dim: int, length: int, kept: int) -> Any:
    """[.., length, ..] -> [.., kept, ..]; tokens that were flattened to [batch * length, hidden] likewise."""
    if not isinstance(x, Tensor):
        return x
    if x.dim() == 2 and x.shape[0] == BATCH * length:
        batched = x.unflatten(0, (BATCH, length) if dim == 1 else (length, BATCH))
        return batched.narrow(dim, length - kept, kept).flatten(0, 1)
    return x.narrow(dim, length - kept, kept) if x.dim() == 3 and x.shape[dim] == length else x


def _hidden(call: Call) -> Tensor:
    found: Tensor = call.args[0] if call.args else call.kwargs["hidden_states"]
    return found


def first_tensor(value: Any) -> Tensor:
    """The first tensor in a nest; there must be one."""
    found: Tensor = next(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return found


def answer(copied: nn.Module, root: str, answers: dict[str, Any]) -> None:
    """Let modules of a copy of ``root`` return fixed outputs instead of computing them."""
    for name, answer in answers.items():
        vars(copied.get_submodule(relative(name, root)))["forward"] = _Answer(answer)


class _Answer:
    """A ``forward`` that returns copies of a fixed value for any arguments."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return tree_map(fresh, self._value)


def check_gradients(
    module: nn.Module, trace: Trace, regions: Iterable[Region], covered: Callable[[str], bool], dim: int
) -> None:
    """Refuse parameters whose gradient is partly whole, and regions that would send tokens to the wrong rank.

    Args:
        module: the traced module.
        trace: its trace.
        regions: the regions of the trunk.
        covered: whether a parameter of that name belongs to a layer of the trunk.
        dim: dim of the sequence in the hidden state.

    Raises:
        ValueError: there is such a parameter or region; the message names it.
    """
    regions = list(regions)
    for name in [*_shared_with_gathered(trace, regions), *_inside_and_outside(module, covered)]:
        raise ValueError(mixed(name))
    exposed = used_directly(module, trace)
    for name, call in trace.calls.items():
        held = any(id(p) in exposed for p in call.module.parameters(recurse=False))
        if is_tagged(call.module) and held and covered(f"{name}.weight"):
            raise ValueError(
                f"`sequence_parallel=True`: a parameter of {name!r} is used without calling that layer, on what may be "
                "all of the tokens or none; turn sequence parallelism off."
            )
    for region in regions:
        column, row = trace.input_of(region.columns[0]), trace.input_of(region.row)
        if dim == 1 and column.dim() != row.dim():
            raise ValueError(
                f"`sequence_parallel=True`: tokens are flattened between {region.columns[0]!r}, which reads "
                f"{column.dim()} dims, and {region.row!r}, which reads {row.dim()}; turn sequence parallelism off."
            )


def _shared_with_gathered(trace: Trace, regions: list[Region]) -> Iterable[str]:
    """Parameters that are used inside gathered regions, where tensors are whole, and elsewhere."""
    gathered = {region.row for region in regions if region.gathered}
    for region in regions:
        for name in region.inner if region.gathered else ():
            if {reader for reader, met in trace.between.items() if name in met} - gathered:
                yield name


def _inside_and_outside(module: nn.Module, covered: Callable[[str], bool]) -> Iterable[str]:
    """Parameters that a layer of the trunk shares with a module outside of the trunk."""
    places: dict[int, set[bool]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), set()).add(covered(name))
        if len(places[id(parameter)]) > 1:
            yield name
