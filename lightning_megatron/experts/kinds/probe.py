"""Whether a module does with its experts what their split takes for granted, found out on a copy of it.

The copy's forward runs on random tokens as it was written, and once more with its experts in parts that see the rows
meant for them only, in another order. Outputs and gradients must agree.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from lightning_megatron.experts.exchange.sending import Owners
from lightning_megatron.experts.kinds.inner_cut import InnerCut, find_inner_cut
from lightning_megatron.experts.kinds.listed import Differs, ListedExperts, experts_of, lead_list
from lightning_megatron.experts.kinds.stacked import (
    Choice,
    computed,
    fill,
    has_joint_stacks,
    in_turns,
    mixed,
    with_experts,
)
from lightning_megatron.pipeline.elsewhere.undo import unchanged

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 5e-2


def try_stacked(module: nn.Module, experts: int, parts: int, dims: Mapping[str, int] | None = None) -> str:
    """Why a module is no mixture of stacked experts; "" if it is one.

    Args:
        module: a copy, with real parameters on the CPU; it is changed.
        experts: how many it looks to have.
        parts: over how many ranks they are to be shared out.
        dims: of its parameters, where not the first one counts experts.
    """
    taken = _taken(module, experts)
    return taken if isinstance(taken, str) else _compare(module, experts, parts, dims or {}, *taken[1:])


def cut_stacked(module: nn.Module, experts: int, parts: int) -> InnerCut | str:
    """How stacked experts can be cut along their inner width, or why they cannot be.

    Args:
        module: see :func:`try_stacked`, which has recognised them.
        experts: how many there are.
        parts: over how many ranks each of them is to be cut.
    """
    taken = _taken(module, experts)
    if isinstance(taken, str):
        return taken
    if has_joint_stacks(module):
        return "their matrices lie one below the other in one"
    return find_inner_cut(module, parts, functools.partial(module, *taken[0]), stacked=True)


def _taken(module: nn.Module, experts: int) -> tuple[list[Any], Choice, Tensor] | str:
    """The first random arguments that a module filled with random numbers takes, and what it gives; or why not."""
    generator = torch.Generator().manual_seed(0)
    fill(module, generator)
    trained = any(parameter.requires_grad for parameter in module.parameters())
    why = "its forward does not take hidden states, indices of experts and weights"
    for values in _guesses(module, experts, generator):
        try:
            choice = Choice(values)
            whole = module(*values)
            computes = isinstance(whole, Tensor) and (whole.requires_grad or not trained)
            if computes and whole.is_floating_point() and whole.shape[:-1] == choice.hidden.shape[:-1]:
                return values, choice, whole
            why = "its forward does not return one row for each token"
        except Exception as error:
            why = f"its forward does not run on hidden states, indices of experts and weights ({error})"
    return why


def cut_one(expert: nn.Module, width: int, parts: int) -> InnerCut | str:
    """How one expert of a list can be cut along its inner width, or why it cannot be.

    Args:
        expert: a copy, with real parameters on the CPU; it is changed.
        width: of the rows that it takes.
        parts: over how many ranks it is to be cut.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in expert.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.3)
    rows = torch.randn(12, width, generator=generator).to(next(expert.parameters()).dtype)
    try:
        return find_inner_cut(expert, parts, lambda: cast(Tensor, expert(rows)), stacked=False)
    except Exception as error:
        return f"it does not run on rows by itself ({error})"


def _guesses(module: nn.Module, experts: int, generator: torch.Generator) -> Iterator[list[Tensor]]:
    """Arguments to try: hidden states of each size that the parameters have, flat or in sequences, in every order."""
    sizes = {n: None for p in module.parameters() for n in (*p.shape[1:], *p.shape[:1])}
    dtype = next(p.dtype for p in module.parameters())
    leads: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((4 * experts,),) * 2, ((2, 2 * experts),) * 2]
    leads.append(((2, 2 * experts), (4 * experts,)))
    for order, (lead, chosen) in itertools.product(itertools.permutations(range(3)), leads):
        index = torch.rand(*chosen, experts, generator=generator).argsort(-1)[..., : min(2, experts)]
        weights = torch.rand(index.shape, generator=generator).to(dtype) + 0.1
        for size in sizes:
            values = torch.randn(*lead, size, generator=generator).to(dtype), index, weights
            yield [values[place] for place in order]


def _compare(
    module: nn.Module, experts: int, parts: int, dims: Mapping[str, int], choice: Choice, whole: Tensor
) -> str:
    trained = [p for p in module.parameters() if p.requires_grad]
    local = experts // parts

    def send(rows: Tensor, expert: Tensor) -> Tensor:
        found: list[Tensor] = []
        places: list[Tensor] = []
        for part in range(parts):
            own = _part_of(module, experts, slice(part * local, (part + 1) * local), choice, dims)
            for place in in_turns(((expert // local) == part).nonzero().view(-1)):
                places.append(place)
                found.append(own(rows[place], expert[place] - part * local))
        return torch.cat(found)[torch.cat(places).argsort()]

    try:
        split = mixed(choice, send)
    except Exception as error:
        return f"its forward does not run on a part of its experts ({error})"
    tolerance = _TOLERANCE.get(whole.dtype, _COARSE)
    if split.shape != whole.shape or not _alike(whole, split, tolerance):
        return "its output is not the weighted sum of what each expert makes of a token by itself"
    if torch.is_autocast_enabled(whole.device.type):  # gradients of float32 weights are sums of narrow ones
        tolerance = _COARSE
    weighed = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1)).to(whole.dtype)
    pairs = [
        torch.autograd.grad((each * weighed).sum(), trained, allow_unused=True) if trained else ()
        for each in (whole, split)
    ]
    for one, other in zip(*pairs, strict=True):
        if (one is None) != (other is None) or (one is not None and not _alike(one, other, tolerance)):
            return "the gradients of its parameters are not those of each expert by itself"
    return ""


class _Alone(ListedExperts):
    """Leads a list of experts of which one process has all; they see their rows in two parts, in another order."""

    checks = True

    def _send(self, module: nn.Module, rows: Tensor, expert: Tensor, called: list[int]) -> Tensor:
        experts, parts = self.experts(module), in_turns(torch.arange(len(rows)))
        asked = [number in called for number in range(len(experts))]
        found = []
        for part in parts:
            counts = expert[part].bincount(minlength=len(experts)).tolist()
            found.append(self.computed(experts, rows[part], expert[part], counts, asked))
        return torch.cat(found)[torch.cat(parts).argsort()]


def try_listed(module: nn.Module, *paths: str) -> tuple[str, dict[str, tuple[int, int]]]:
    """Why a module does not route its tokens to lists of experts, "" if it does; and the experts' widths.

    Args:
        module: a copy, with real parameters on the CPU; it is changed.
        paths: of the lists in it.

    Returns:
        The reason, and by path, in the order of their first calls, the widths of what the lists' experts take and give.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.3)
    why, unlike = "its forward takes no tokens", ""
    sizes = {n: None for p in module.parameters() for n in p.shape if p.is_floating_point()}
    dtype = _dtype_of(module)
    for size, lead in itertools.product(sizes, ((2, 12), (24,))):
        tokens = torch.randn(*lead, size, generator=generator).to(dtype).requires_grad_()
        try:
            whole, widths = _run_as_written(module, paths, tokens)
        except _Unlike as error:
            unlike = unlike or str(error)
        except Exception as error:
            why = f"its forward does not run on {len(lead) + 1} dims of tokens by themselves ({error})"
        else:
            return _compare_list(module, widths, tokens, whole), widths
    return unlike or why, {}  # of tokens of the wrong width it says nothing


def _dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype of most of its numbers, and so of its tokens: routers may have one of their own."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0]


def _tolerance_of(module: nn.Module) -> float:
    """How far results may differ by rounding, in the coarsest dtype in it."""
    return max(_TOLERANCE.get(parameter.dtype, _COARSE) for parameter in module.parameters())


class _Unlike(Exception):
    """Raised by a module that runs, but is not a mixture."""


def _run_as_written(module: nn.Module, paths: Sequence[str], tokens: Tensor) -> tuple[Any, dict[str, tuple[int, int]]]:
    """A module's output for tokens, and the widths of its experts' inputs and outputs, in the order of their calls."""
    seen: dict[str, set[tuple[int, int]]] = {}

    def note(path: str, expert: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if len(args) != 1 or kwargs or not all(isinstance(value, Tensor) for value in (*args, output)):
            raise _Unlike("its experts do not take one tensor and give one")
        if args[0].shape[:-1] != output.shape[:-1]:
            raise _Unlike("its experts do not give a row for each row that they are given")
        seen.setdefault(path, set()).add((args[0].shape[-1], output.shape[-1]))

    experts = [(path, expert) for path in paths for expert in experts_of(module.get_submodule(path))]
    handles = [
        expert.register_forward_hook(functools.partial(note, path), with_kwargs=True) for path, expert in experts
    ]
    try:
        with torch.random.fork_rng([]), unchanged(module):
            whole = module(tokens)
    finally:
        for handle in handles:
            handle.remove()
    if len(seen) < len(paths):
        raise _Unlike("its experts are not called in its forward")
    if any(len(widths) != 1 for widths in seen.values()):
        raise _Unlike("its experts differ in width")
    return whole, {path: widths.pop() for path, widths in seen.items()}


def _compare_list(module: nn.Module, lists: Mapping[str, tuple[int, int]], tokens: Tensor, whole: Any) -> str:
    for path, widths in lists.items():
        lead_list(module, _Alone("", path, widths, Owners.__new__(Owners)))
    trained = [tokens, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    try:
        with torch.random.fork_rng([]):
            split = module(tokens)
    except Differs:
        return "what an expert is given depends on what another one has answered, or on numbers drawn anew"
    except Exception as error:
        return f"its forward does not run on noted calls of its experts ({error})"
    pairs = [_leaves(each) for each in (whole, split)]
    tolerance = _tolerance_of(module)
    if len(pairs[0]) != len(pairs[1]) or not pairs[0]:
        return "its output is not that of its experts on each row by itself"
    for one, other in zip(*pairs, strict=True):
        if one.shape != other.shape or not _alike(one, other, tolerance):
            noise = ", as it draws random numbers (noise, dropout): set what draws them to 0" if draws(module) else ""
            return f"its output is not that of its experts on each row by itself{noise}"
    sums = [sum((each * each.detach().cos()).sum() for each in leaves if each.requires_grad) for leaves in pairs]
    found = [torch.autograd.grad(cast(Tensor, each), trained, allow_unused=True) for each in sums]
    for one, other in zip(*found, strict=True):
        if (one is None) != (other is None) or (one is not None and not _alike(one, other, tolerance)):
            return "its gradients are not those of its experts on each row by itself"
    return ""


def mixes_samples(module: nn.Module) -> str:
    """How a module's result depends on the whole batch, which replicas would change; "" if it does not.

    Hundreds of tokens, so that capacities are met.

    Args:
        module: a copy, with real parameters on the CPU; it is changed.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.3)
    sizes = {n: None for p in module.parameters() for n in p.shape if p.is_floating_point()}
    dtype = _dtype_of(module)
    for size, lead in itertools.product(sizes, ((2, 192), (384,))):
        tokens = torch.randn(*lead, size, generator=generator).to(dtype)
        try:
            runs = [_run_and_look(module, part) for part in (tokens, *tokens.tensor_split(2))]
        except Exception:
            continue
        return _compare_halves(runs[0], runs[1], runs[2], _tolerance_of(module))
    return ""  # it does not run by itself: nothing is known


def draws(module: nn.Module) -> bool:
    """Whether what a module that routes tokens gives for them depends on random numbers.

    Args:
        module: a copy, with real parameters on the CPU; it is changed.
    """
    sizes = {n: None for p in module.parameters() for n in p.shape if p.is_floating_point()}
    dtype = _dtype_of(module)
    generator = torch.Generator().manual_seed(0)
    for size, lead in itertools.product(sizes, ((2, 192), (384,))):
        tokens, runs = torch.randn(*lead, size, generator=generator).to(dtype), []
        try:
            for seed in range(2):
                with torch.random.fork_rng([]):
                    torch.manual_seed(seed)
                    runs.append(_run_and_look(module, tokens)[0])
        except Exception:
            continue
        return not all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    return False


def _run_and_look(module: nn.Module, tokens: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """A module's output for tokens, and the numbers with gradients that it keeps on itself meanwhile."""
    with unchanged(module):
        output = _leaves(module(tokens))
        kept = {
            f"{name}.{key}" if name else key: value.detach()
            for name, child in module.named_modules()
            for key, value in vars(child).items()
            if isinstance(value, Tensor) and value.requires_grad and value.numel() == 1
        }
        return [leaf.detach() for leaf in output], kept


def _compare_halves(whole: Any, one: Any, other: Any, tolerance: float) -> str:
    for outputs in zip(whole[0], one[0], other[0], strict=True):
        if outputs[0].dim() == 0:
            if not _adds_up(*outputs, tolerance):
                return "what it returns for the whole batch is no mean or sum over samples"
        elif not _alike(outputs[0], torch.cat(outputs[1:]), tolerance):
            return "what it gives for a sample depends on the others of the batch"
    for name, value in whole[1].items():
        if name in one[1] and name in other[1] and not _adds_up(value, one[1][name], other[1][name], tolerance):
            return f"keeps `{name}`, which is no mean or sum over samples"
    return ""


def _adds_up(whole: Tensor, one: Tensor, other: Tensor, tolerance: float) -> bool:
    return any(_alike(whole, each, tolerance) for each in ((one + other) / 2, one + other))


def _leaves(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _part_of(
    module: nn.Module, experts: int, block: slice, choice: Choice, dims: Mapping[str, int]
) -> Callable[[Tensor, Tensor], Tensor]:
    """The module's forward with a block of its experts."""

    def part(name: str, parameter: Tensor) -> Tensor:
        dim = dims.get(name, 0)
        each = parameter.shape[dim] // experts  # 1 where experts have a dim of their own
        return parameter.narrow(dim, block.start * each, (block.stop - block.start) * each)

    values = {name: part(name, parameter) for name, parameter in module.named_parameters()}

    def own(*arguments: Any) -> Any:
        with with_experts(module, experts, block.stop - block.start):
            return functional_call(module, values, arguments)

    return lambda rows, expert: computed(own, choice, rows, expert)


def _alike(one: Tensor, other: Tensor, tolerance: float) -> bool:
    one, other = one.detach(), other.detach()
    if one.shape != other.shape:
        return False
    return not one.numel() or bool((one - other).abs().max() <= tolerance * max(1.0, float(one.abs().max())))
