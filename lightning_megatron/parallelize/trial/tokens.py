"""Makes sure that nothing between split regions mixes tokens, before it is given only some of them.

Under sequence parallelism a layer sees ``s/t`` tokens, and only its regions see all. An attention that the plan
leaves whole would then silently attend within its own shard. So each kind of layer is run once on the last few tokens
of the traced input (the first would not tell, for causal attention), its regions answering what they answered for the
whole sequence, cut to those tokens. That is what the last rank will see; the output must be the last tokens of the
traced one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_megatron.mesh.parts.names import lies_in, parent
from lightning_megatron.parallelize.pairs.blueprint import Blueprint
from lightning_megatron.parallelize.pairs.regions import Door, Region
from lightning_megatron.parallelize.plan.patterns import generalize
from lightning_megatron.parallelize.plan.styles import Style
from lightning_megatron.parallelize.reading.inputs import BATCH
from lightning_megatron.parallelize.reading.trace import Call, Trace, fresh, quiet_fast_paths
from lightning_megatron.parallelize.trial.replay import TOLERANCE


def check_layers(
    module: nn.Module,
    blueprint: Blueprint,
    trace: Trace,
    layers: list[str],
    doors: dict[str, Door | None],
    dim: int,
) -> None:
    """Run each kind of layer, and each kind of module at whose call the sequence is gathered, on part of the sequence.

    Args:
        module: the traced module.
        blueprint: its regions and styles.
        trace: its trace.
        layers: names of the trunk's layers.
        doors: per region, where the sequence is gathered (see `SequencePlan`); a door that does not fit is replaced by
            None, in place.
        dim: the sequence's dim in the hidden state.

    Raises:
        ValueError: a layer mixes tokens outside its regions, or a region's code needs all of what it is not given.
    """
    check = _Check(module, trace, dim, _hidden(trace.calls[layers[0]]))
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


def check_between(module: nn.Module, trace: Trace, layers: list[str], dim: int) -> None:
    """Run the code between the layers on part of the sequence: each layer answers what it did, cut to the last tokens.

    Args:
        module: the traced module.
        trace: its trace.
        layers: names of the trunk's layers.
        dim: the sequence's dim in the hidden state.

    Raises:
        ValueError: the input of a layer is not the last tokens of what it was, for one because a residual connection
            around the layers adds what was there before they were split.
    """
    root = next(
        (name for name in trace.roots if all(lies_in(layer, name) for layer in layers)),
        None,
    )
    if root is None or root in layers or any(trace.counts[name] > 1 for name in layers):
        return
    check = _Check(module, trace, dim, _hidden(trace.calls[layers[0]]))
    answers = {name: check.part(trace.calls[name].output) for name in layers[:-1]}
    answers[layers[-1]] = trace.calls[layers[-1]].output
    found: list[str] = []

    def compare(name: str, want: Tensor) -> Any:
        def hook(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            got = args[0] if args else kwargs["hidden_states"]
            if got.shape != want.shape or _deviation(got, want) > TOLERANCE.get(want.dtype, 1e-4):
                found.append(name)

        return hook

    handles = [
        module.get_submodule(name).register_forward_pre_hook(
            compare(name, check.part(_hidden(trace.calls[name]))), with_kwargs=True
        )
        for name in layers[1:]
    ]
    call, problem = trace.calls[root], ""
    try:
        with _answering(module, answers), torch.no_grad():
            call.module(*tree_map(fresh, call.args), **tree_map(fresh, call.kwargs))
    except Exception as error:  # the module's own code may fail in any way on parts of different lengths
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        for handle in handles:
            handle.remove()
    if problem or found:
        trunk, why = parent(layers[0]), problem or f"the input of {found[0]!r} deviates"
        raise ValueError(
            f"`sequence_parallel=True`: the code between the layers of {trunk!r} does not work on a part of the tokens "
            f"({why}), as where a residual connection goes around them; move it into the layers, or turn sequence "
            "parallelism off."
        )


class _Check:
    """Replays parts of a traced module as the last rank of a sequence-parallel group would run them."""

    def __init__(self, module: nn.Module, trace: Trace, dim: int, hidden: Tensor) -> None:
        self._module = module
        self._trace = trace
        self._dim = dim
        self._shape = hidden.shape
        self._seen: dict[Any, str] = {}

    def part(self, value: Any) -> Any:
        """The last tokens of every hidden state in a value."""
        length = self._shape[self._dim]
        return tree_map(lambda x: _last_tokens(x, self._dim, length, length // 2), value)

    def answers_of(self, region: Region, door: Door | None) -> dict[str, Any]:
        """What the modules of a region answer: all tokens inside, this rank's at its end."""
        calls = self._trace.calls
        if door is None:
            inside = {name: calls[name].output for name in region.columns}
        elif lies_in(parent(region.row), door[0]):
            return {door[0]: self.part(calls[door[0]].output)}
        else:
            inside = {door[0]: calls[door[0]].output}
        return {**inside, region.row: self.part(calls[region.row].output)}

    def door_fits(self, door: Door, row: str) -> bool:
        """Whether a module handed the whole sequence uses it for its region only (and adds no residual to it)."""
        if not lies_in(parent(row), door[0]):
            return True
        call = self._trace.calls[door[0]]
        whole = set(door[1])
        args = tuple(v if i in whole else self._shorter(v) for i, v in enumerate(call.args))
        kwargs = {k: v if k in whole else self._shorter(v) for k, v in call.kwargs.items()}
        return not self._difference(call, args, kwargs, {row: self.part(self._trace.calls[row].output)})

    def layer(self, name: str, answers: dict[str, Any]) -> None:
        """Raise a ``ValueError`` unless the layer computes the last tokens of its output from those of its input."""
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
        """Further arguments of the hidden state's shape come from the residual stream, and are cut."""
        return self.part(value) if isinstance(value, Tensor) and value.shape == self._shape else value

    def _difference(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], answers: dict[str, Any]) -> str:
        """What goes wrong; empty if nothing does. Modules of one kind are run once."""
        kind = (generalize(call.name), type(call.module), tuple(generalize(name) for name in answers))
        if kind not in self._seen:
            self._seen[kind] = self._run(call, args, kwargs, answers)
        return self._seen[kind]

    def _run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], answers: dict[str, Any]) -> str:
        try:
            kept = self._kept_by(call)
            with _answering(self._module, answers), torch.no_grad():
                output = call.module(*tree_map(fresh, args), **tree_map(fresh, kwargs))
                now = _attributes(call.module)
            got = _first_tensor(output)
        except Exception as error:  # the module's own code may fail in any way on a shorter sequence
            return f"{type(error).__name__}: {error}".splitlines()[0] + "; it may read the length outside its attention"
        want = _first_tensor(self.part(call.output))
        if got.shape != want.shape:
            return f"its output has shape {tuple(got.shape)} instead of {tuple(want.shape)}"
        difference = _deviation(got, want)
        if difference > TOLERANCE.get(want.dtype, 1e-4):
            return f"its output deviates by {difference:.1e}"
        both = enumerate(zip(tree_leaves(output), tree_leaves(call.output), strict=False))
        sides = {f"output {index}": pair for index, pair in both}
        sides |= {f"its `{name}`": (now[name], value) for name, value in kept.items() if name in now}
        return _summed_over_tokens(sides)

    def _kept_by(self, call: Call) -> dict[str, Tensor]:
        """Tensors with a gradient that the module leaves on itself when it sees all tokens: auxiliary losses."""
        before = _attributes(call.module)
        with _answering(self._module, {}), torch.enable_grad():
            call.module(*tree_map(fresh, call.args), **tree_map(fresh, call.kwargs))
            after = _attributes(call.module)
        return {name: x.detach() for name, x in after.items() if x.requires_grad and x is not before.get(name)}


def _summed_over_tokens(sides: dict[str, tuple[Any, Any]]) -> str:
    """Which of the values beside the hidden state, as (computed from some tokens, from all), is no value per token."""
    for name, (got, want) in sides.items():
        if not (isinstance(got, Tensor) and isinstance(want, Tensor)) or got.shape != want.shape:
            continue
        if want.is_floating_point() and _deviation(got, want) > TOLERANCE.get(want.dtype, 1e-4):
            return f"{name}, beside the hidden state, is computed over all tokens, as an auxiliary loss is"
    return ""


def _deviation(got: Tensor, want: Tensor) -> float:
    if not want.numel():
        return 0.0
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-30))


def _attributes(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that are plain attributes of the parts of a module, by dotted name."""
    found: dict[str, Tensor] = {}
    for name, part in module.named_modules():
        found |= {f"{name}.{key}".lstrip("."): x for key, x in vars(part).items() if isinstance(x, Tensor)}
    return found


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


def _first_tensor(value: Any) -> Tensor:
    found: Tensor = next(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return found


@contextlib.contextmanager
def _answering(module: nn.Module, answers: dict[str, Any]) -> Iterator[None]:
    """Evaluation mode, with some modules giving fixed answers instead of computing them."""
    modes = {part: part.training for part in module.modules()}
    shown = {name: vars(module.get_submodule(name)).get("forward") for name in answers}
    with torch.random.fork_rng(devices=[]), quiet_fast_paths():
        try:
            for part in modes:
                part.training = False
            for name, answer in answers.items():
                vars(module.get_submodule(name))["forward"] = _Answer(answer)
            yield
        finally:
            for name, forward in shown.items():
                if forward is None:
                    del vars(module.get_submodule(name))["forward"]
                else:
                    vars(module.get_submodule(name))["forward"] = forward
            for part, mode in modes.items():
                part.training = mode


class _Answer:
    """Returns what it was given, whatever it is called with."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return tree_map(fresh, self._value)
