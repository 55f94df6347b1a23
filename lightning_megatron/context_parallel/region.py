"""The region of a step in which tokens are split: from the module's repeated layers up to the step's result.

Code before the layers (the embedding, positions, masks) sees whole tensors on every rank. The first layer's input is
cut to this rank's rows, and all that is computed from it keeps its global shape; see
`lightning_megatron.context_parallel.token_shards`. Outside of a step the module computes whole, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from lightning_megatron.context_parallel.block_split import BlockSplit, from_described, in_blocks
from lightning_megatron.context_parallel.custom_functions import CustomFunctions
from lightning_megatron.context_parallel.mask_work import agreed, balance_of, mask_among, work_of
from lightning_megatron.context_parallel.rule_masks import masks_by_rule
from lightning_megatron.context_parallel.rules.token_views import split_of
from lightning_megatron.context_parallel.token_shards import TokenShards, cut
from lightning_megatron.context_parallel.token_split import BALANCES, Scope
from lightning_megatron.layers.all_here import all_tokens_asked, all_tokens_here, begin_pass, takes_gradients
from lightning_megatron.layers.whole import GATHERED, WholeTensor
from lightning_megatron.mesh.autograd import in_backward
from lightning_megatron.mesh.pickling import users_hook

METHODS = ("auto", "gather", "ring", "ulysses")
_KNOWN = ("method", "balance")


def check_options(size: int, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options with their defaults: ``method``, ``balance``, and ``heads_over``, the ranks that share heads.

    Raises:
        ValueError: options without context ranks, or values that there are not.
    """
    given = dict(options or {})
    if given and size == 1:
        raise ValueError("`context_parallel_options` is given, but `context_parallel_size=1`; set it to 2 or more.")
    if unknown := sorted(set(given) - set(_KNOWN)):
        raise ValueError(f"`context_parallel_options` has {unknown}; known options are {', '.join(_KNOWN)}.")
    method, balance = given.get("method", "auto"), given.get("balance", "auto")
    method, heads_over = _in_levels(size, method)
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(
            f"`context_parallel_options={{'method': {method!r}}}` is not implemented; use 'gather' (or 'auto', the "
            "same): keys and values are gathered, queries stay split; 'ring': keys and values pass from rank to rank; "
            "'ulysses': ranks exchange tokens for heads; or ('ulysses', n): n ranks do, and keys and values pass "
            "between such."
        )
    if balance not in ("auto", *BALANCES):
        raise ValueError(
            f"`context_parallel_options={{'balance': {balance!r}}}` must be 'auto', {' or '.join(map(repr, BALANCES))}."
        )
    method = "gather" if method == "auto" else method
    return {"method": method, "balance": balance, "heads_over": heads_over}


def _torchs_attention(layer: nn.Module) -> nn.MultiheadAttention | None:
    return next((part for part in layer.modules() if isinstance(part, nn.MultiheadAttention)), None)


def _token_dim(attention: nn.MultiheadAttention | None) -> int:
    """Dim of the tokens in what a layer with this attention is given."""
    return 0 if attention is not None and not attention.batch_first else 1


def _in_levels(size: int, method: Any) -> tuple[Any, int]:
    """The method without its number of ranks, and the ranks that share heads.

    ``("ulysses", 2)`` of 4 ranks gives ``("ulysses", 2)``, of 2 ranks the same, and ``("ulysses", 1)`` is ``"ring"``.
    """
    if not isinstance(method, list | tuple) or len(method) != 2 or method[0] != "ulysses":
        return method, size
    ranks = method[1]
    if type(ranks) is not int or ranks < 1 or size % ranks:
        fits = [number for number in range(1, size + 1) if size % number == 0]
        raise ValueError(
            f"`context_parallel_options={{'method': ('ulysses', {ranks!r})}}` must divide "
            f"`context_parallel_size={size}`; use {', '.join(map(str, fits[:-1]))} or {fits[-1]}."
        )
    return ("ulysses", ranks) if ranks > 1 else ("ring", size)


class TokenRegion:
    """Splits the tokens of the steps of one module; from :meth:`open` to :meth:`close`.

    Args:
        module: the user's module, whole.
        layers: its repeated layers; each call of one whose first tensor is whole cuts that to this rank's rows.
        group: the context ranks.
        options: as `check_options` gives them.
        levels: ranks among which heads are shared, and those of the ring between such, where these are not all.
        blocks: tensor ranks of which each keeps a block of those rows (sequence parallelism), and the name of the layer
            where they begin to; ``None`` where all keep the same.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[nn.Module],
        group: dist.ProcessGroup,
        options: Mapping[str, Any],
        blocks: tuple[dist.ProcessGroup, str] | None = None,
        levels: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
    ) -> None:
        _refuse_scripted(module, layers, group.size())
        self._blocks = None if blocks is None else blocks[0]
        self._first = None if blocks is None else blocks[1]
        self._module, self._group, self._balance = module, group, options["balance"]
        self.scope = Scope(options["method"], levels)
        self.scope.shared_out = in_blocks
        self.cuts: dict[tuple[tuple[int, ...], str], tuple[int, float]] = {}
        self._names = {id(part): name for name, part in module.named_modules()}
        self._given: list[tuple[nn.Module, Tensor, TokenShards, int]] = []
        self._functions, self._beside, self._skips = CustomFunctions(), tuple[Any, ...](), False
        self._layers, self._handles = [called for layer in layers for called in _called(layer)], list[RemovableHandle]()

    def open(self) -> None:
        """Let the layers cut what they are given, in steps: those of a module that is not cut at its layers."""
        self.close()
        self._functions.open()
        for layer in self._layers:
            before = layer.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True)
            self._handles += [before, layer.register_forward_hook(self.leave)]

    def close(self) -> None:
        """Leave the layers as they were."""
        self._functions.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def run(self, step: Callable[[Any], Any], batch: Any) -> Any:
        """Run a step of the user's with split tokens; what it returns is whole.

        Raises:
            RuntimeError: the step did something whose result a rank would know in part only, or it trains, and its
                layers were not called with ``[batch, tokens, features]``.
        """
        self._refuse_hooks()
        self.scope.running, self.scope.cut = True, False
        try:
            with masks_by_rule(self.scope.masks):
                output = step(batch)
            if not self.scope.cut and torch.is_grad_enabled():  # each rank may evaluate what is not split
                raise RuntimeError(
                    f"no layer of `{type(self._module).__name__}` was called in this step with a tensor of [batch, "
                    "tokens, features], among its arguments or in tuples, lists and dictionaries of them, so no tokens "
                    "were split; use `context_parallel_size=1`, or name the layers with `pipeline_layers=...`."
                )
            return tree_map(_whole, output)
        finally:
            self.scope.running = False
            self._given.clear()

    def enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of a layer that is about to run, its first tensor of numbers cut to this rank's rows."""
        if (self.scope.running and not all_tokens_asked()) or in_backward():
            taken: list[Tensor] = []
            self._beside = args, kwargs
            numbers = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point()]
            self._skips = any(x.ndim == 3 for x in numbers)
            try:
                args = self._with_shard(layer, args, taken)
                kwargs = {name: self._with_shard(layer, value, taken) for name, value in kwargs.items()}
            finally:
                self._beside = ()
            self.scope.cut |= bool(taken)  # none: token numbers for an embedding among the layers, say
        return args, kwargs

    def parted(self, tensor: WholeTensor) -> tuple[Tensor, Hashable]:
        """This rank's rows, and what the next stage has to know of how they are split."""
        return tensor.local(), (tensor.along, split_of(tensor).described)

    def joined(self, rows: Tensor, described: Any) -> TokenShards:
        """The tensor of global shape again, on the next stage."""
        self.scope.cut = True
        dim, split = described
        return TokenShards.show(rows, from_described(split, self._group, self.scope, self._blocks), dim)

    def _with_shard(self, layer: nn.Module, value: Any, taken: list[Tensor]) -> Any:
        """``value`` with its first tensor of numbers cut, of three dims if one is; lists and dictionaries stay the same
        objects.
        """
        if taken:
            return value
        if isinstance(value, Tensor):
            if not value.is_floating_point() or (self._skips and value.ndim != 3):
                return value
            taken.append(value)
            if isinstance(value, WholeTensor):
                if self._blocks is not None:
                    begin_pass(uneven=not isinstance(split_of(value), BlockSplit))
                return value
            if not takes_gradients() and value.ndim == 3 and self._has_too_few(layer, value):
                return value
            shard = self.cut_at(layer, value)
            self._given.append((layer, value, shard, shard.local()._version))
            return shard
        if type(value) is tuple:
            return tuple(self._with_shard(layer, entry, taken) for entry in value)
        if isinstance(value, list | dict):
            for key, entry in list(enumerate(value) if isinstance(value, list) else value.items()):
                value[key] = self._with_shard(layer, entry, taken)
        return value

    def leave(self, layer: nn.Module, *called: Any) -> None:
        """Let whoever called the layer see what it wrote into its input."""
        while self._given and self._given[-1][0] is layer:
            value, shard, version = self._given.pop()[1:]
            if shard.local()._version != version:
                value.copy_(shard.full())

    def _has_too_few(self, layer: nn.Module, value: Tensor) -> bool:
        """Whether not every rank can have a token, as where a decoding loop gives one at a time."""
        return value.shape[_token_dim(_torchs_attention(layer))] < self._group.size()

    def cut_at(self, layer: nn.Module, value: Tensor) -> TokenShards:
        """This rank's rows of a tensor that a layer is given whole.

        Raises:
            RuntimeError: it is none of tokens, or has too few.
        """
        name, size = self._names.get(id(layer), type(layer).__name__), self._group.size()
        if value.ndim != 3:
            raise RuntimeError(
                f"`context_parallel_size={size}` splits layers whose input is [batch, tokens, features]; `{name}` was "
                f"given {tuple(value.shape)}. Name other layers with `pipeline_layers=...`, or use "
                "`context_parallel_size=1`."
            )
        attention = _torchs_attention(layer)
        dim = _token_dim(attention)
        if value.shape[dim] < size:
            raise RuntimeError(
                f"`{name}` was given {value.shape[dim]} tokens, fewer than `context_parallel_size={size}` ranks can "
                "split in training; use `context_parallel_size=1`."
            )
        if self._blocks is not None and name != self._first:
            raise RuntimeError(
                f"`sequence_parallel=True` with `context_parallel_size={size}`: `{name}` was given whole tokens, but "
                f"layers split over tensor ranks begin to share them at `{self._first}`. Name one list of layers with "
                "`pipeline_layers=...`, or use `sequence_parallel=False`."
            )
        balance, blocks = "zigzag" if self._balance == "auto" else self._balance, self._blocks
        if blocks is not None:
            begin_pass(uneven=value.shape[dim] % blocks.size() > 0)
            blocks = None if all_tokens_here() else blocks
        work = self._work(value, dim, attention is not None) if self._balance == "auto" and blocks is None else None
        shards = cut(value, self._group, dim, balance, self.scope, blocks, work)
        split = split_of(shards)
        split = split if blocks is None else split.together()
        if work is None:
            which, most = (tuple(value.shape), "causal work"), split.causal_balance
        else:
            which, most = (tuple(value.shape), "work"), balance_of(work, split.length, split.runs)
        count, before = self.cuts.get(which, (0, 0.0))
        self.cuts[which] = count + 1, max(before, most)
        return shards

    def _work(self, value: Tensor, dim: int, true_hides: bool) -> list[int] | None:
        """The work that a layer's mask leaves for each piece of tokens, if there is a mask."""
        length, size = value.shape[dim], self._group.size()
        mask = mask_among(self._beside, length, value)
        work = None if mask is None else work_of(mask, size, true_hides=true_hides)
        return agreed(work, length, self._group, value.device)

    def _refuse_hooks(self) -> None:
        """Refuse hooks that are given gradients of which a rank knows a part only."""
        for name, part in self._module.named_modules():
            if part._backward_hooks or part._backward_pre_hooks:
                raise RuntimeError(_hook_refused(f"a backward hook of `{name or type(part).__name__}`", self._group))
            for leaf, parameter in part._parameters.items():
                hooks = None if parameter is None else parameter._backward_hooks
                if hooks and any(users_hook(hook) is not None for hook in hooks.values()):
                    raise RuntimeError(
                        _hook_refused(f"a gradient hook of `{f'{name}.{leaf}'.lstrip('.')}`", self._group)
                    )

    def report(self) -> str:
        """Report of this rank: what was split, and which functions gathered."""
        lines = [f"tokens split over {self._group.size()} ranks, {self._balance}"]
        how = {
            "gather": "all keys and values gathered",
            "ring": "keys and values of one rank at a time",
            "ulysses": "tokens exchanged for heads",
        }
        if self.scope.levels is not None:
            inner, outer = (group.size() for group in self.scope.levels)
            how["ulysses"] += f" over {inner} ranks, keys and values around a ring of {outer}"
        lines += [f"  attention {count:>6} x  {how[name]}" for name, count in self.scope.attended.most_common()]
        for (shape, work), (count, balance) in self.cuts.items():
            lines.append(f"  cut {count:>6} x  {list(shape)}, {work} of a rank at most {balance:.3f} of the mean")
        for name, count in self.scope.masks.most_common():
            told = f"made whole for `{name}`" if name else "made as a rule, computed where queries meet keys"
            lines.append(f"  mask {count:>11} x  {told}")
        lines += [f"  gathered {count:>6} x  `{name}`" for name, count in GATHERED.most_common()]
        return "\n".join(lines)


def _refuse_scripted(module: nn.Module, layers: Sequence[nn.Module], size: int) -> None:
    """Refuse layers of compiled code, which would see an empty tensor.

    Raises:
        ValueError: a layer is, or has in it, a TorchScript module.
    """
    inside = {id(part) for layer in layers for part in layer.modules()}
    for name, part in module.named_modules():
        if id(part) in inside and isinstance(part, torch.jit.ScriptModule):
            raise ValueError(
                f"`{name}` is a TorchScript module, which can take no tensor whose tokens are split over ranks "
                f"(`context_parallel_size={size}`). Put the Python module there, or use `context_parallel_size=1`."
            )


def _called(layer: nn.Module) -> list[nn.Module]:
    """The modules that are called for a layer: itself, or the members of a list that only holds them."""
    if not isinstance(layer, nn.ModuleList | nn.ModuleDict):
        return [layer]
    return [called for member in layer.children() for called in _called(member)]


def _hook_refused(what: str, group: dist.ProcessGroup) -> str:
    return (
        f"{what} would be given the gradient of this rank's tokens only (`context_parallel_size={group.size()}`). Look "
        "at gradients in `on_after_backward` or later, where they are whole, or use `context_parallel_size=1`."
    )


def _whole(value: Any) -> Any:
    return value.full() if isinstance(value, WholeTensor) else value


__all__ = ["METHODS", "TokenRegion", "check_options"]
