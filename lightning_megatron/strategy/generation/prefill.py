"""Prompts of a batch, run in smaller batches than its tokens are decoded in.

A token of a batch costs a read of the weights, whatever the rows, so decoding wants large batches, and no more of them
than there are stages. Prompts are bound by arithmetic: halves of a batch cost half each, and the more of them are on
their way, the shorter stages wait when the pipeline fills (DeepSpeed Inference, section IV-C). Two stages, batches a
and b, whole and in halves, of which one takes a column::

    stage 0   a a b b . .      stage 0   a b a b .      p stages, p batches in q parts each: p + (p - 1) / q
    stage 1   . . a a b b      stage 1   . a b a b      times as long as one batch on one stage

What the halves leave in their caches is put together, and the whole batch goes on from its last token of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_ROWS = ("keys", "values")


def check_prefill(size: int | None, model: Any, options: Mapping[str, Any]) -> None:
    """Refuse prompts in smaller batches where there is no cache to put together.

    Args:
        size: prompts in a batch of prefill; ``None`` for as many as are decoded.
        model: Hugging Face's.
        options: of its ``generate``.

    Raises:
        ValueError: names the option.
    """
    if size is None:
        return
    if size < 1:
        raise ValueError(f"`prefill_batch_size={size}` must be at least 1.")
    known = model.generation_config
    cache = options.get("cache_implementation", known.cache_implementation)
    without = options.get("use_cache", known.use_cache) is False
    if without or cache not in (None, "dynamic") or getattr(model, "_is_stateful", False):
        raise ValueError(
            f"`prefill_batch_size={size}` puts key-value caches that grow together, and `{type(model).__name__}` is to "
            "generate without one; leave it out, or generate with `use_cache=True` and a dynamic cache."
        )


def prefilled(model: Any, size: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Run the prompts of a batch but for their last tokens.

    Args:
        model: Hugging Face's.
        size: prompts at a time.
        given: arguments of ``generate``: ``input_ids`` and ``attention_mask``, both ``[rows, longest]``, and options.

    Returns:
        The arguments of ``generate`` that goes on from there.
    """
    rows, longest = given["input_ids"].shape
    if rows <= size or longest < 2:
        return dict(given)
    own: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False, "num_beams": 1, "num_return_sequences": 1}
    own |= {"use_cache": True, "return_dict_in_generate": True}
    own |= {name: given[name] for name in ("pad_token_id", "prefill_chunk_size") if name in given}
    caches = []
    for start in range(0, rows, size):
        part = {name: given[name][start : start + size, :-1] for name in ("input_ids", "attention_mask")}
        caches.append(model.generate(**part, **own).past_key_values)
    cache = _together(caches)
    beams = given.get("num_beams", model.generation_config.num_beams) or 1
    if beams > 1:
        cache.batch_repeat_interleave(beams)
    return {**{name: value for name, value in given.items() if name != "prefill_chunk_size"}, "past_key_values": cache}


def _together(caches: Sequence[Any]) -> Any:
    """The first of the caches, with the rows of all; the others are emptied, layer by layer."""
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        for name in _ROWS:
            parts: list[Tensor] = [getattr(layer, name) for layer in layers]
            setattr(layers[0], name, torch.cat(parts))
            for layer in layers[1:]:
                setattr(layer, name, None)
    return caches[0]
