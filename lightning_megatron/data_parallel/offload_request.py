"""The values of ``optimizer_offload``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_megatron.data_parallel.option_dicts import option_dict

OffloadOptions = bool | Mapping[str, Any]
"""``optimizer_offload``: whether, or where to, how much stays, and how often a bucket comes to the device."""

_KEYS = ("to", "keep", "interleave")


@dataclass(frozen=True)
class Offload:
    """Location of the optimizer's weights and state, and of its steps.

    Attributes:
        folder: of files on this host that hold them; ``None`` for host memory.
        keep: fraction of this rank's share that stays on the device.
        interleave: every how manieth bucket is brought to the device for its step; ``None`` for none of them, and
            ``"auto"`` for what the measured speeds of the processor and of copies make fastest.
    """

    folder: Path | None = None
    keep: float = 0.0
    interleave: int | Literal["auto"] | None = "auto"


def offload_of(value: Any) -> Offload | None:
    """The value of ``optimizer_offload``; ``None`` for ``False``.

    Raises:
        ValueError: it cannot be meant so; the message says what can.
    """
    said = option_dict("optimizer_offload", value, _KEYS)
    if said is None:
        return None
    to, keep, interleave = said.get("to", "cpu"), said.get("keep", 0.0), said.get("interleave", "auto")
    if not isinstance(to, (str, os.PathLike)) or str(to) in ("", "cuda", "gpu", "nvme", "disk"):
        raise ValueError(f"`optimizer_offload={{'to': {to!r}}}` must be 'cpu', or a folder on a local disk.")
    if isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0 <= keep <= 1:
        raise ValueError(
            f"`optimizer_offload={{'keep': {keep!r}}}` must be the fraction that stays on the device, from 0 to 1."
        )
    whole = isinstance(interleave, int) and not isinstance(interleave, bool)
    if interleave is not False and interleave != "auto" and not (whole and interleave >= 1):
        raise ValueError(
            f"`optimizer_offload={{'interleave': {interleave!r}}}` must be 'auto', False, or a whole number k >= 1: "
            "every k-th bucket steps on the device."
        )
    return Offload(None if str(to) == "cpu" else Path(to), float(keep), None if interleave is False else interleave)


def check_offload(options: Any) -> None:
    """Refuse a value that cannot be meant, and options that the planner would choose without it.

    Raises:
        ValueError: with the option.
    """
    if offload_of(options.optimizer_offload) is None:
        return
    for name in ("layout", "topology"):
        if getattr(options, name) is not None:
            raise ValueError(
                f"`optimizer_offload` cannot be combined with `{name}={getattr(options, name)!r}`: the planner does "
                f"not know it; leave `{name}` out, or `optimizer_offload`."
            )
