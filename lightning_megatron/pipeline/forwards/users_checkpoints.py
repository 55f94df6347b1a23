"""Activation checkpoints of the user's own, ``torch.utils.checkpoint``, around layers of a cut module.

A checkpoint calls its function again in the backward. Around one layer that is the layer's own stage's business: it is
given again what it was given. A function that calls several layers would call those of other stages too, which hold
nothing here, with what stands for their inputs::

    checkpoint(layer, x)                    recomputed by the stage that has the layer
    checkpoint_sequential(layers, 2, x)     refused, at the second layer
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch

from lightning_megatron.mesh.autograd import innermost_hooks, saved_hooks
from lightning_megatron.mesh.parts.packages import module_of
from lightning_megatron.mesh.torch_functions import line_of_user

_HOME = "torch.utils.checkpoint"
_layers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # what lives as long as a checkpoint's forward -> its layer


def check_checkpoint(index: int, name: str) -> None:
    """Check that no checkpoint which is around the call of layer ``index`` has been around that of another layer.

    Args:
        index: of the layer.
        name: of the layer.

    Raises:
        RuntimeError: one has; with the line of the user's code that made it.
    """
    # A reentrant checkpoint runs its forward without gradients; the other kind has hooks on what autograd saves.
    local = "gen" if torch.is_grad_enabled() else "ctx"
    if local == "gen" and (saved_hooks(True) is None or innermost_hooks() is None):
        return
    function = "checkpoint" if local == "gen" else "forward"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and module_of(frame) == _HOME:
            made = frame.f_locals.get(local)
            if made is not None and _layers.setdefault(made, index) != index:
                _refuse(name, frame)
        frame = frame.f_back


def _refuse(name: str, frame: FrameType) -> NoReturn:
    raise RuntimeError(
        f"`torch.utils.checkpoint` ({line_of_user(frame)}) is around several layers of a "
        f"pipeline, `{name}` among them. In the backward it would call them all again, those of other stages too. Make "
        'one checkpoint per layer, with `use_reentrant=False`; or leave it out, and pass `activation_recompute="full"` '
        'or `"selective"` to `MegatronStrategy`.'
    )
