"""Weights of a pretrained model for one that peft has wrapped.

peft moves the layers that it adapts one level down, and puts tensors of its own beside them::

    in files            in the module
    q_proj.weight       q_proj.base_layer.weight, q_proj.lora_A.default.weight, q_proj.lora_B.default.weight
    lm_head.weight      lm_head.original_module.weight, lm_head.modules_to_save.default.weight

No file has an adapter that is to be trained: it keeps the values that its constructor gives it. Where those are
computed from weights that come later, they would be others, so that is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from lightning_megatron.checkpoints.files.sources import Source
from lightning_megatron.checkpoints.state.stored import Match, match

_BASE, _ORIGINAL, _SAVED = "base_layer", "original_module", "modules_to_save"


def names_in_files(names: Iterable[str]) -> dict[str, str]:
    """By name of a tensor, the one that it has in the model alone; those of adapters have none.

    ``["a.base_layer.w", "a.lora_A.default.w", "b.w"]`` give ``{"a.base_layer.w": "a.w", "b.w": "b.w"}``.
    """
    names = list(names)
    adapted = {name.partition(f".{kind}.")[0] for kind in (_BASE, _ORIGINAL) for name in names if f".{kind}." in name}
    found = ((name, _in_files(name.split("."), adapted)) for name in names)
    return {name: plain for name, plain in found if plain is not None}


def _in_files(parts: Sequence[str], adapted: set[str]) -> str | None:
    kept: list[str] = []
    at = 0
    while at < len(parts):
        kept.append(parts[at])
        at += 1
        if ".".join(parts[:at]) in adapted and at < len(parts):
            skipped = {_BASE: 1, _ORIGINAL: 1, _SAVED: 2}.get(parts[at], 0)
            if not skipped:
                return None
            at += skipped
    return ".".join(kept)


def match_adapted(
    source: Source,
    shapes: Mapping[str, torch.Size],
    further: Mapping[str, str],
    path: Any,
    built: Mapping[str, Sequence[str]],
    prefix_of: Any,
) -> Match | None:
    """The same as ``match_weights`` for a model with adapters; ``None`` if there are none.

    Args:
        source: the opened files.
        shapes: logical shapes by name, over the whole module.
        further: tied names of the module.
        path: for messages.
        built: by name of a tensor that its constructor gives values, which others those are computed from.
        prefix_of: finds what to take from stored names and to put instead.

    Raises:
        RuntimeError: the values of an adapter's tensor cannot be told, or are computed from what the files have.
    """
    plain = names_in_files(shapes)
    if len(plain) == len(shapes):
        return None
    bare = {inside: shapes[name] for name, inside in plain.items()}
    kinds = {name: kind for name, kind in source.kinds.items() if not name.startswith("optimizer.")}
    taken, put = prefix_of(kinds, bare)
    part = {name: shape for name, shape in bare.items() if name.startswith(put)}
    tied = {plain[name]: plain[first] for name, first in further.items() if name in plain and first in plain}
    found = match(kinds, part, tied, source.aliases, {taken: put})
    stored = {name: found.stored[inside] for name, inside in plain.items() if inside in found.stored}
    own = [name for name in shapes if name not in plain]
    for name in own:
        before = next((other for other in built.get(name, ()) if other in stored), None)
        if name not in built or before is not None:
            why = "the code that builds it" if before is None else f"`{before}`, which is read from {path} later"
            raise RuntimeError(
                f"`{name}` is not in {path}, and on the meta device it has no numbers: it gets them from {why}. Build "
                "the module with its weights (`from_pretrained`), outside of `torch.device('meta')`."
            )
    return Match(stored, found.missing, found.unexpected, found.reshaped)
