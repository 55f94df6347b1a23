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
_LOADS = (*_STATE, "load_state_dict", "_load_from_state_dict", "set_extra_state")
_LOADING = ("on_load_checkpoint", "load_state_dict", "on_fit_start", "on_train_start")


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


def nobody_looks_on(module: pl.LightningModule, gradients: ModelGradients) -> bool:
    """Whether weights are spread, and no code of the user's runs while others are read into them."""
    windows = gradients.windows
    if windows is None or not windows.stays_spread or windows.place is None:
        return False
    trainer = trainer_of(module)
    callbacks: list[Callback] = [] if trainer is None else trainer.callbacks  # type: ignore[attr-defined]
    foreign = [callback for callback in foreign_callbacks(callbacks) if not is_blind(callback)]
    hooked = [c for c in foreign if any(is_overridden(hook, c, parent=Callback) for hook in _LOADING)]
    if hooked or is_overridden("on_load_checkpoint", module):
        return False
    return all(_is_usual(part, _LOADS) and not _hooks_of_loading(part) for part in module.modules())


def _hooks_of_loading(part: nn.Module) -> bool:
    return bool(part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks)


def _is_usual(part: nn.Module, names: tuple[str, ...] = _STATE) -> bool:
    """Whether a module's state is its parameters and buffers."""
    if part._state_dict_hooks or part._state_dict_pre_hooks:
        return False
    if all(getattr(type(part), name) is getattr(nn.Module, name) for name in names):
        return True
    return next(part.parameters(), None) is None  # a metric
