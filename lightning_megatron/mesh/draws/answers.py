"""Attention with dropout, answered from counters, and torch's functions that call others which draw.

An attention's mask is drawn as any other, so its scores are kept. Fused kernels draw inside and show nobody what. So
``scaled_dot_product_attention`` with dropout is computed in steps here, as torch's reference does, which needs memory
for the scores: [batch, heads, seq, seq], twice.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.mesh.draws.functions import ANSWERS, abstract, dropped
from lightning_megatron.mesh.draws.mode import Answer, LayoutDraws


def _attention(draws: LayoutDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = {**dict.fromkeys(names), **dict(zip(names, args, strict=False)), **kwargs}
    query, key, value, p = given["query"], given["key"], given["value"], given["dropout_p"] or 0.0
    if p == 0.0 or abstract(query):
        return func(*args, **kwargs)
    if given["enable_gqa"]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scale = query.shape[-1] ** -0.5 if given["scale"] is None else given["scale"]
    scores = (query * scale) @ key.transpose(-2, -1)
    mask = given["attn_mask"]
    if given["is_causal"]:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    factors = dropped(draws, "scaled_dot_product_attention", weights, p).logical_not_().to(weights.dtype)
    out: Tensor = (weights * factors.mul_(1 / (1 - p))) @ value
    return out


def body_of(function: types.FunctionType) -> types.FunctionType:
    """A torch function that no mode takes over, while the functions that it calls are taken over as ever."""
    unseen = {
        name: lambda *_: False
        for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    }
    copy = types.FunctionType(
        function.__code__, {**function.__globals__, **unseen}, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _inside(function: Any, place: int, name: str) -> Answer:
    """Functions that draw by calling others, if they are told to."""
    body = body_of(function)

    def answer(draws: LayoutDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = kwargs.get(name, args[place] if len(args) > place else 0.0)
        if not given or not kwargs.get("training", True):
            return func(*args, **kwargs)
        with draws:
            return body(*args, **kwargs)

    return answer


RUN_CODE: tuple[Any, ...] = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
"""Functions of torch's in which code of others may run again."""


def _seeing(function: Any) -> Answer:
    """Functions that run code of others: backwards, in which layers are computed again."""
    body = body_of(function)

    def answer(draws: LayoutDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with draws:
            return body(*args, **kwargs)

    return answer


ALL_ANSWERS: dict[Any, Answer] = {
    **ANSWERS,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _inside(F.multi_head_attention_forward, 10, "dropout_p"),
    **{function: _seeing(function) for function in RUN_CODE},
}
"""What :class:`~.mode.LayoutDraws` answers."""
