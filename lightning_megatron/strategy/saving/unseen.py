"""Whether a checkpoint can be written from the shards of weights, without making them whole.

Hooks of the user's that run while a checkpoint is made find whole weights, and whole tensors in ``state_dict``, as in
one process. So do modules that make their state by code of their own.
"""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_megatron.data_parallel.model_gradients import ModelGradients
from lightning_megatron.strategy.hooks.blind import is_blind
from lightning_megatron.strategy.lightning.hooks import foreign_callbacks
from lightning_megatron.strategy.lightning.trainer_access import trainer_of

_STATE = ("state_dict", "_save_to_state_dict", "get_extra_state")


def nobody_looks(module: pl.LightningModule, gradients: ModelGradients) -> bool:
    """Whether weights are spread, and no code of the user's runs while a checkpoint of them is made."""
    windows = gradients.windows
    if windows is None or not windows.stays_spread or windows.place is None:
        return False
    trainer = trainer_of(module)
    if trainer is None or is_overridden("on_save_checkpoint", module):
        return False
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    foreign = [callback for callback in foreign_callbacks(callbacks) if not is_blind(callback)]
    hooked = [c for c in callbacks if is_overridden("on_save_checkpoint", c, parent=Callback)]
    own = [c for c in foreign if is_overridden("state_dict", c, parent=Callback)]
    return not (hooked or own) and all(_is_usual(part) for part in module.modules())


def _is_usual(part: nn.Module) -> bool:
    """Whether a module's state is its parameters and buffers."""
    if part._state_dict_hooks or part._state_dict_pre_hooks:
        return False
    if all(getattr(type(part), name) is getattr(nn.Module, name) for name in _STATE):
        return True
    return next(part.parameters(), None) is None  # a metric
