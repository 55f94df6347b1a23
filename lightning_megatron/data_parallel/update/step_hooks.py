"""An optimizer that steps on other tensors than the module's parameters, by hooks around its ``step``.

Between steps the groups hold the module's parameters, and ``state_dict`` numbers those; the state is that of the
tensors which stand in their places during a step. These have the attributes that the user has set on the parameters
(``p.scale``, ``p.no_decay``), which an optimizer may read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

_OURS = "__reduce_ex__"  # of a parameter in a bucket, see `flat_weights`


class StepHooks(ABC):
    """Hooks around ``step`` and ``state_dict`` of one optimizer, until :meth:`close`.

    Args:
        optimizer: as ``configure_optimizers`` returned it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters: list[list[nn.Parameter]] | None = None
        self._steps = 0  # under way: the `step` of a subclass may call that of its parent, which has hooks of its own
        self._state: Any = None
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        optimizer.register_state_dict_pre_hook(self._before_state_dict)
        optimizer.register_state_dict_post_hook(self._after_state_dict)

    def close(self) -> None:
        """Put the parameters back and remove the hooks around ``step``; the state stays that of their stand-ins."""
        self.restore()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @abstractmethod
    def skip(self) -> None:
        """Skip the update of the step under way: weights and optimizer state stay as they are."""

    @abstractmethod
    def restore(self) -> None:
        """Put the parameters back into the groups, also after a step that failed."""

    @abstractmethod
    def _begin(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Begin a step, which calls what this returns in the place of its closure."""

    @abstractmethod
    def _finish(self) -> None:
        """End a step."""

    @abstractmethod
    def _keys(self) -> Iterable[tuple[nn.Parameter, nn.Parameter | None]]:
        """Parameters in the groups, and what the state of each is kept by; ``None`` if not here."""

    def _members(self) -> list[list[nn.Parameter]]:
        """The module's parameters, by group."""
        return self._parameters or [group["params"] for group in self._optimizer.param_groups]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._steps += 1
        if self._steps > 1:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        inner = self._begin(closure)
        if closure is None:
            return None
        if "closure" in kwargs:
            return args, {**kwargs, "closure": inner}
        return (args[0], inner, *args[2:]), kwargs

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._steps -= 1
        if self._steps == 0:
            self._finish()

    def cut_state(self) -> None:
        """Cut state of parameters down to that of the tensors in their places, where that is less."""
        return

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer.state, SeenStates):
            return
        keys = list(self._keys())
        self._state, own = optimizer.state, dict(optimizer.state)
        named = {parameter: own.pop(key) for parameter, key in keys if key is not None and key in own}
        optimizer.state = defaultdict(dict, own | named)

    def _after_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if self._state is not None:
            optimizer.state, self._state = self._state, None


class SeenStates(defaultdict[Any, Any]):
    """State of an optimizer as code between steps sees it: that of the module's parameters, as in one process."""


def carry_marks(parameters: Sequence[nn.Parameter], stand_ins: Sequence[nn.Parameter | None]) -> None:
    """Give tensors in the places of parameters the attributes that the user has set on these.

    Args:
        parameters: of the module.
        stand_ins: one each, or ``None``.
    """
    pairs = zip(parameters, stand_ins, strict=True)
    for parameter, other, name in [(p, other, name) for p, other in pairs for name in p.__dict__ if name != _OURS]:
        if other is not None:
            other.__dict__[name] = parameter.__dict__[name]


def marks_of(parameter: nn.Parameter) -> dict[str, Any]:
    """Attributes that the user has set on a parameter."""
    return {name: value for name, value in parameter.__dict__.items() if name != _OURS}
