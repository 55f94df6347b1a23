"""Checks that the code between split regions does not mix tokens, so that it can run on sequence shards.

Under sequence parallelism a layer sees ``s/t`` tokens, and only its regions see all tokens. An attention that the plan
leaves whole would silently attend within its shard. So each kind of layer runs once on the last tokens of the traced
input (for causal attention, the first tokens would not show a difference), with the recorded outputs of its regions,
cut to these tokens. This is what the last rank will see; the output must equal the last tokens of the traced output,
and what the regions are given must equal those of what they were given, since their outputs do not show it. A layer of
which this does not hold runs once more with the modules in it answered that mix tokens: those get all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightning_megatron.mesh.parts.names import Parts, lies_in, parent
from lightning_megatron.parallelize.plan.blueprint import Blueprint, Door, Region
from lightning_megatron.parallelize.plan.patterns import generalize
from lightning_megatron.parallelize.plan.styles import Style
from lightning_megatron.parallelize.reading.inputs import BATCH
from lightning_megatron.parallelize.reading.replay import fresh
from lightning_megatron.parallelize.reading.trace import Call, Trace, relative, tensors_left
from lightning_megatron.parallelize.trial.auxiliary import AuxiliaryValues, deviation
from lightning_megatron.parallelize.trial.between_tokens import AllTokens, candidates, other_tokens
from lightning_megatron.parallelize.trial.training import TOLERANCE


@dataclass(frozen=True)
class Tokens:
    """Inputs and outputs of a layer that have tokens, and are split with them.

    Attributes:
        given: places or names of arguments, the hidden state first.
        left: for each leaf of its output, the dim of the tokens; ``None`` for what has none.
    """

    given: tuple[int | str, ...]
    left: tuple[int | None, ...]


def check_layers(
    blueprint: Blueprint,
    trace: Trace,
    layers: list[str],
    doors: dict[str, Door | None],
    dim: int,
) -> tuple[dict[str, Tokens], dict[str, AllTokens]]:
    """Run each kind of layer, and each kind of module at whose call the sequence is gathered, on part of the sequence.

    Args:
        blueprint: regions and styles of the traced module.
        trace: its trace.
        layers: names of the layers of the trunk.
        doors: per region, where the sequence is gathered (see `SequencePlan`); a door that does not work is replaced by
            None, in place, and regions in modules that get all tokens are left out.
        dim: dim of the sequence in the hidden state.

    Returns:
        By layer, what has tokens; and the modules inside of layers that need all of them.

    Raises:
        ValueError: a layer mixes tokens outside its regions, or the code of a region needs tokens that it does not get.
    """
    found: dict[str, Tokens] = {}
    whole: dict[str, AllTokens] = {}
    check = _Check(trace, dim, _hidden(trace.calls[layers[0]]))
    for region in blueprint.regions:
        door = doors.get(region.row)
        if door is not None and not check.door_fits(door, region.row):
            doors[region.row] = None
    for layer in layers:
        tokens, problem = check.layer(layer, check.answers_in(blueprint, doors, layer))
        if tokens is None:
            mixing = check.mixing(blueprint, doors, layer)
            answers = check.answers_in(blueprint, doors, layer, mixing)
            tokens, _ = check.layer(layer, answers, mixing) if mixing else (None, "")
            if tokens is not None:
                whole |= mixing
                for row in [row for row in doors if any(lies_in(row, name) for name in mixing)]:
                    del doors[row]
        if tokens is None:
            raise ValueError(
                f"`sequence_parallel=True`: {layer!r} mixes tokens outside what the plan splits ({problem}); split its "
                "attention as well, or turn sequence parallelism off."
            )
        found[layer] = tokens
    return found, whole


def read_between(trace: Trace, root: str, layers: list[str], dim: int, tokens: Mapping[str, Tokens]) -> str:
    """Run the code around the layers on part of the sequence; each layer returns its recorded output, cut likewise.

    Args:
        trace: the trace of the module.
        root: name of the module that is run, which contains the layers.
        layers: names of the layers of the trunk.
        dim: dim of the sequence in the hidden state.
        tokens: by layer, what has tokens.

    Returns:
        Why that code needs all of the tokens; "" if it does not. The input of a layer is not the last tokens of its
        recorded input, for example because a residual connection around the layers adds the hidden state from before
        the split; or the module gives something else, as where a loss is computed of each layer's output.
    """
    further = next((name for name in layers if len(tokens[name].given) > 1), None)
    if further is not None:
        return f"{further!r} is given more than one tensor of tokens"
    check = _Check(trace, dim, _hidden(trace.calls[layers[0]]))
    whole = {name: trace.calls[name].output for name in layers}
    answers = {name: check.cut(whole[name], tokens[name].left) for name in layers[:-1]} | {
        layers[-1]: whole[layers[-1]]
    }
    found: list[str] = []

    def prepare(copied: nn.Module) -> None:
        answer(copied, root, answers)
        for name in layers[1:]:
            hook = _noting_deviation(found, trace.calls[name], check.part(_hidden(trace.calls[name])))
            copied.get_submodule(relative(name, root)).register_forward_pre_hook(hook, with_kwargs=True)

    replay = trace.replay(root)
    try:
        with torch.no_grad():
            expected = tensors_left(*replay.run(lambda copied: answer(copied, root, whole)))
            left = tensors_left(*replay.run(prepare))
    except Exception as error:  # the module's code may fail in any way on parts of different lengths
        return f"{type(error).__name__}: {error}".splitlines()[0]
    if found:
        return f"the input of {found[0]!r} deviates"
    same = len(left) == len(expected) and all(map(_alike, left, expected))
    return "" if same else "what the module computes from what they give deviates"


def _alike(got: Tensor, want: Tensor) -> bool:
    if got.shape != want.shape or not want.is_floating_point():
        return got.shape == want.shape and torch.equal(got, want)
    return not deviation(got, want) > TOLERANCE.get(want.dtype, 1e-4)


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


class _Check:
    """Replays parts of a traced module as the last rank of a tensor group would run them on its sequence shard."""

    def __init__(self, trace: Trace, dim: int, hidden: Tensor) -> None:
        self._trace = trace
        self._dim = dim
        self._shape = hidden.shape
        self._seen: dict[Any, str] = {}
        self._left: dict[Any, tuple[int | None, ...]] = {}
        self._whole: Mapping[str, AllTokens] = {}

    def cut(self, value: Any, dims: tuple[int | None, ...]) -> Any:
        """The last tokens of the leaves of ``value`` that have tokens, in these dims."""
        leaves, form = tree_flatten(value)
        length = self._shape[self._dim]
        kept = length // 2
        cut = [x if dim is None else x.narrow(dim, length - kept, kept) for x, dim in zip(leaves, dims, strict=True)]
        return tree_unflatten(cut, form)

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

    def answers_in(
        self, blueprint: Blueprint, doors: dict[str, Door | None], name: str, whole: Collection[str] = ()
    ) -> dict[str, Any]:
        """Recorded outputs in a module: of its regions, and of the modules in it that get all tokens."""
        answers = {each: self.part(self._trace.calls[each].output) for each in whole}
        apart = Parts(whole)
        for region in blueprint.regions:
            if lies_in(parent(region.row), name) and region.row not in apart:
                inside = self.answers_of(region, doors[region.row])  # it may begin in the layer before
                answers |= {each: answer for each, answer in inside.items() if lies_in(each, name)}
        for each, style in blueprint.styles.items():
            if style is Style.HEADS and lies_in(parent(each), name) and each not in apart:
                answers[each] = self.part(self._trace.calls[each].output)
        return answers

    def mixing(self, blueprint: Blueprint, doors: dict[str, Door | None], layer: str) -> dict[str, AllTokens]:
        """The modules of a layer that do not compute the last tokens of their output from those of their input."""
        found = candidates(blueprint, self._trace, layer, self.part)
        alone = {name: self.answers_in(blueprint, doors, name) for name in found}
        tried = {name: tokens for name, tokens in found.items() if name not in alone[name]}
        calls = self._trace.calls
        return {n: t for n, t in tried.items() if self._given(calls[n], t.given, alone[n])[1] is None}

    def door_fits(self, door: Door, row: str) -> bool:
        """Whether a module that gets the whole sequence uses it for its region only (and adds no residual to it)."""
        if not lies_in(parent(row), door[0]):
            return True
        call = self._trace.calls[door[0]]
        whole = set(door[1])
        args = tuple(v if i in whole else self._shorter(v) for i, v in enumerate(call.args))
        kwargs = {k: v if k in whole else self._shorter(v) for k, v in call.kwargs.items()}
        return not self._difference(call, args, kwargs, {row: self.part(self._trace.calls[row].output)})

    def layer(
        self, name: str, answers: dict[str, Any], whole: Mapping[str, AllTokens] | None = None
    ) -> tuple[Tokens | None, str]:
        """Check that the layer computes the last tokens of its output from those of its input.

        Args:
            name: the layer's.
            answers: by name, what modules in it give.
            whole: those of them that get all tokens.

        Returns:
            What of its arguments and its output has tokens; or ``None``, and what differs.
        """
        self._whole = whole or {}
        call = self._trace.calls[name]
        hidden = 0 if call.args else "hidden_states"
        first, further = self._given(call, (hidden,), answers), (hidden, *self._with_tokens(call, hidden))
        problem, tokens = first
        if problem and len(further) > 1:
            _, tokens = self._given(call, further, answers)
        self._whole = {}
        return tokens, problem

    def _given(self, call: Call, keys: tuple[int | str, ...], answers: dict[str, Any]) -> tuple[str, Tokens | None]:
        """The difference where these arguments are cut, as text; and what has tokens, if there is none."""
        length = self._shape[self._dim]

        def cut(x: Tensor) -> Tensor:
            return x.narrow(self._dim, length - length // 2, length // 2) if x.dim() == 2 else self.part(x)

        args = tuple(cut(x) if key in keys else x for key, x in enumerate(call.args))
        kwargs = {key: cut(x) if key in keys else x for key, x in call.kwargs.items()}
        problem = self._difference(call, args, kwargs, answers, keys)
        return problem, None if problem else Tokens(keys, self._left[self._kind(call, answers, keys)])

    def _with_tokens(self, call: Call, hidden: int | str) -> list[int | str]:
        """Further arguments with a number, or a vector, for each token: [batch, seq] or [batch, seq, ..]."""
        named: dict[Any, Any] = {**dict(enumerate(call.args)), **call.kwargs}
        shape = self._shape[:2]
        tensors = {key: x for key, x in named.items() if key != hidden and isinstance(x, Tensor)}
        return [k for k, x in tensors.items() if x.is_floating_point() and x.dim() in (2, 3) and x.shape[:2] == shape]

    def _shorter(self, value: Any) -> Any:
        """Cut a further argument that has the shape of the hidden state, because it comes from the residual stream."""
        return self.part(value) if isinstance(value, Tensor) and value.shape == self._shape else value

    def _kind(self, call: Call, answers: dict[str, Any], keys: tuple[int | str, ...]) -> Any:
        named = tuple((generalize(name), name in self._whole) for name in answers)
        return generalize(call.name), type(call.module), named, keys

    def _difference(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        answers: dict[str, Any],
        keys: tuple[int | str, ...] = (),
    ) -> str:
        """The difference to the recorded output as text; empty if there is none. Modules of one kind run once."""
        kind = self._kind(call, answers, keys)
        if kind not in self._seen:
            self._seen[kind], self._left[kind] = self._run(call, args, kwargs, answers)
        return self._seen[kind]

    def _run(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], answers: dict[str, Any]
    ) -> tuple[str, tuple[int | None, ...]]:
        """The difference, and the dims of tokens in the leaves of the output."""
        beside, unlike = AuxiliaryValues(self._trace.replay(call.name), self.part), list[str]()

        def prepare(copied: nn.Module) -> None:
            answer(copied, call.name, answers)
            for name in answers:
                hook = self._noting_unlike(self._trace.calls[name], unlike)
                copied.get_submodule(relative(name, call.name)).register_forward_pre_hook(hook, with_kwargs=True)

        try:
            beside.note()
            with torch.no_grad():
                copied, output = beside.replay.run(prepare, args=args, kwargs=kwargs)
            got = first_tensor(output)
        except Exception as error:  # the module's code may fail in any way on a shorter sequence
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            return f"{said}; it may read the length outside its attention", ()
        if unlike:
            return f"what {unlike[0]!r} is given deviates", ()
        want = first_tensor(self.part(call.output))
        if got.shape != want.shape:
            return f"its output has shape {tuple(got.shape)} instead of {tuple(want.shape)}", ()
        difference = deviation(got, want)
        if difference > TOLERANCE.get(want.dtype, 1e-4):
            return f"its output deviates by {difference:.1e}", ()
        dims, problem = self._dims_of_tokens(output, call.output)
        whole = {name: self._trace.calls[name].output for name in answers}
        inside = functools.partial(answer, root=call.name, answers=whole)
        name = beside.over_all_tokens((args, kwargs), (copied, output), call.output, inside)
        if name:
            return f"{name}, besides the hidden state, is computed over all tokens, as an auxiliary loss is", ()
        return problem, dims

    def _noting_unlike(self, call: Call, unlike: list[str]) -> Callable[..., None]:
        """A hook that notes a module that is given some tokens, and not the last ones of what it was given."""

        def hook(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tokens = self._whole.get(call.name)
            if tokens is not None and other_tokens(call, tokens, args, kwargs):
                unlike.append(call.name)
            whole = tree_leaves((call.args, call.kwargs))
            for got, all_tokens in zip(tree_leaves((args, kwargs)), whole, strict=False):
                want = self.part(all_tokens)
                some = isinstance(got, Tensor) and isinstance(want, Tensor) and got.shape == want.shape
                if some and want.shape != all_tokens.shape and not _alike(got, want):
                    unlike.append(call.name)

        return hook

    def _dims_of_tokens(self, output: Any, recorded: Any) -> tuple[tuple[int | None, ...], str]:
        """For each leaf of an output of some tokens, in which dim it has them; and the first that is not theirs."""
        length, dims = self._shape[self._dim], list[int | None]()
        kept = length // 2
        got, want = tree_leaves(output), tree_leaves(recorded)
        hidden = next(index for index, leaf in enumerate(got) if isinstance(leaf, Tensor))
        for index, (part, whole) in enumerate(zip(got, want, strict=False)):
            both = isinstance(part, Tensor) and isinstance(whole, Tensor) and part.dim() == whole.dim()
            differ = [d for d in range(whole.dim()) if part.shape[d] != whole.shape[d]] if both else []
            tokens = len(differ) == 1 and (part.shape[differ[0]], whole.shape[differ[0]]) == (kept, length)
            dims.append(differ[0] if tokens else self._dim if index == hidden else None)
            if tokens and not _alike(part, whole.narrow(differ[0], length - kept, kept)):
                return (), f"output {index}, besides the hidden state, mixes tokens"
        return tuple(dims), ""


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
