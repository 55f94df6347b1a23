"""Prompts as a model takes them: checked before any work, in batches, padded on the left, and cut at their ends.

Batches are consecutive prompts, whatever the layout, and each draws from a stream of random numbers of its own. So what
is generated for a prompt depends on neither the number of processes nor what was generated before::

    prompts   0 1 2 3 4 5 6     batch size 2     0 1 | 2 3 | 4 5 | 6
                                                 replica 0 has 0 1 and 4 5, replica 1 has 2 3 and 6
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.pipeline.repeated.caches import Caches
from lightning_megatron.strategy.generation.prefill import check_prefill, prefilled

_OURS = (
    *("inputs", "input_ids", "attention_mask", "max_length", "num_return_sequences", "return_dict_in_generate"),
    *("streamer", "assistant_model", "past_key_values", "inputs_embeds", "max_time"),
)
_CACHES = (None, "dynamic", "dynamic_full", "static")


class Requests:
    """Checked prompts of one generation.

    Args:
        model: Hugging Face's model that is to continue them; on the meta device, and whole or cut, as it is.
        prompts: token ids of each.
        size: prompts in a batch.
        seed: of random numbers, which sampling draws.
        options: of the model's ``generate``, with ``max_new_tokens``.
        stages: of the pipeline.
        tokenizer: Hugging Face's, if the prompts come from one.
        prefill: prompts at a time before the first token of a batch; ``None`` for all of it.

    Raises:
        ValueError: a prompt, an option, the tokenizer or the model's kind does not fit; the message says what.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        size: int,
        seed: int,
        options: Mapping[str, Any],
        stages: int,
        tokenizer: Any = None,
        prefill: int | None = None,
    ) -> None:
        self._prompts, self._size, self._seed, self._options = prompts, size, seed, dict(options)
        self._prefill = prefill
        check_prefill(prefill, model, options)
        _check_options(self._options, size)
        _check_kind(model, self._options, stages)
        _check_prompts(prompts, model.config, int(options["max_new_tokens"]), tokenizer)
        known = model.generation_config
        ends = options.get("eos_token_id", known.eos_token_id)
        self._ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        pads = (options.get("pad_token_id"), known.pad_token_id, *self._ends, 0)
        self._options["pad_token_id"] = self._pad = next(pad for pad in pads if pad is not None)
        self._stops = bool(options.get("stop_strings", known.stop_strings))
        if self._stops and tokenizer is not None:
            self._options["tokenizer"] = tokenizer

    def __len__(self) -> int:
        """Number of batches."""
        return -(-len(self._prompts) // self._size)

    def rows(self, batch: int) -> range:
        """Numbers of the prompts in a batch."""
        return range(batch * self._size, min((batch + 1) * self._size, len(self._prompts)))

    def prefilled(self, model: Any, batch: int, device: torch.device) -> dict[str, Any]:
        """The arguments of :meth:`begin`; prompts are run first, if fewer at a time are asked for."""
        given = self.begin(batch, device)
        return given if self._prefill is None else prefilled(model, self._prefill, given)

    def begin(self, batch: int, device: torch.device) -> dict[str, Any]:
        """Seed the global generators for a batch, and make the arguments of ``generate``.

        Returns:
            ``input_ids`` and ``attention_mask``, both ``[rows, longest]``, and the options.
        """
        torch.manual_seed(self._seed + batch)
        prompts = [self._prompts[row] for row in self.rows(batch)]
        longest = max(map(len, prompts))
        ids = torch.tensor([[self._pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device), **self._options}

    def found(self, batch: int, tokens: Tensor) -> dict[int, list[int]]:
        """Continuation of each prompt of a batch, by its number: up to and with the first token that ends a text.

        Args:
            batch: its number.
            tokens: what ``generate`` returned, ``[rows, longest + new]``.
        """
        rows = self.rows(batch)
        start = max(len(self._prompts[row]) for row in rows)
        return {row: self._cut(new) for row, new in zip(rows, tokens[:, start:].tolist(), strict=True)}

    def _cut(self, tokens: list[int]) -> list[int]:
        end = next((at for at, token in enumerate(tokens) if token in self._ends), len(tokens))
        tokens = tokens[: end + 1]
        while self._stops and tokens and tokens[-1] == self._pad and self._pad not in self._ends:
            tokens.pop()  # after a string that ends a text
        return tokens


def _check_options(options: Mapping[str, Any], size: int) -> None:
    ours = [name for name in _OURS if name in options]
    if ours:
        raise ValueError(f"`{ours[0]}` cannot be given for a list of prompts; call the model's own `generate` with it.")
    if size < 1:
        raise ValueError(f"`batch_size={size}` must be at least 1.")
    new = options["max_new_tokens"]
    if not isinstance(new, int) or new < 1:
        raise ValueError(f"`max_new_tokens={new}` must be at least 1.")


def _check_kind(model: Any, options: Mapping[str, Any], stages: int) -> None:
    """Refuse models that continue no prompt, and caches that cannot be divided into stages."""
    kind, config = type(model).__name__, model.config
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"`{kind}` is an encoder and a decoder, and a list of prompts is for models that continue a text; call its "
            "own `generate` in `predict_step`."
        )
    asked = options.get("cache_implementation", model.generation_config.cache_implementation)
    if stages == 1 or options.get("use_cache", True) is False:
        return
    if asked not in _CACHES:
        raise ValueError(
            f"`cache_implementation={asked!r}` is not supported under a pipeline, whose stages skip layers; use "
            '"dynamic" or "static", or one pipeline stage.'
        )
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"`{kind}` keeps states in place of keys and values, which pipeline stages cannot share; use one pipeline "
            "stage, or `use_cache=False`."
        )
    from transformers import DynamicCache

    try:
        Caches((), {"past_key_values": DynamicCache(config=config.get_text_config(decoder=True))}, kind)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _check_prompts(prompts: Sequence[Sequence[int]], config: Any, new: int, tokenizer: Any) -> None:
    """Refuse prompts that the model has no positions or no embeddings for."""
    text = config.get_text_config(decoder=True)
    vocabulary, positions = text.vocab_size, getattr(text, "max_position_embeddings", None)
    if tokenizer is not None and len(tokenizer) > vocabulary:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and the model an embedding of {vocabulary}: they do not belong "
            "together. Give the tokenizer that the model was trained with, or resize the embedding."
        )
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {number} has no tokens; a text begins with one at least.")
        wrong = [token for token in prompt if not 0 <= token < vocabulary]
        if wrong:
            raise ValueError(
                f"prompt {number} has token {wrong[0]}, and the model's vocabulary ends at {vocabulary - 1}; give the "
                "tokenizer that the model was trained with."
            )
        if positions is not None and len(prompt) + new - 1 > positions:  # the last token is not given to the model
            room = positions + 1 - new
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens and {new} are to follow, but the model has {positions} "
                f"positions; {f'cut the prompt to {room} tokens, or ' if room > 0 else ''}lower `max_new_tokens`."
            )
