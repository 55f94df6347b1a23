"""Patterns of a plan, matched against module names.

A pattern is a dotted name in which ``*`` stands for one component, as in Hugging Face's ``base_model_tp_plan``. It
matches a name if it matches its last components, so ``layers.*.mlp.up_proj`` also matches
``model.layers.0.mlp.up_proj`` if the model is part of another module.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` matches ``name`` or its last components."""
    wanted, parts = pattern.split("."), name.split(".")
    if len(parts) < len(wanted):
        return False
    return all(fnmatch.fnmatchcase(p, w) for p, w in zip(parts[len(parts) - len(wanted) :], wanted, strict=True))


def expand(plan: Mapping[str, str], names: Iterable[str]) -> dict[str, list[str]]:
    """The names that each pattern of a plan matches.

    Raises:
        ValueError: a pattern matches no name; the message suggests similar names.
    """
    names = list(names)
    found = {pattern: [name for name in names if matches(pattern, name)] for pattern in plan}
    lost = [pattern for pattern, hits in found.items() if not hits]
    if lost:
        raise ValueError("; ".join(_lost(pattern, names) for pattern in lost))
    return found


def generalize(name: str) -> str:
    """A name with its indices replaced by ``*``: ``h.3.attn.c_attn`` -> ``h.*.attn.c_attn``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _lost(pattern: str, names: Iterable[str]) -> str:
    general = list(dict.fromkeys(generalize(name) for name in names if name))
    tails = {tail: name for name in general for tail in _tails(name)}
    close = list(dict.fromkeys(tails[c] for c in difflib.get_close_matches(pattern, tails, n=3, cutoff=0.5)))
    hint = f"did you mean {' or '.join(repr(c) for c in close)}?" if close else "no module has a similar name"
    return f"Plan entry {pattern!r} matches no module; {hint}"


def _tails(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]
