"""The user's hooks around an optimizer's step, which run as other hooks between steps do.

torch calls them inside of ``step``, where the groups hold what this rank updates: shards, slices, a stage's own. One
that clips by a norm, decays or counts over ``optimizer.param_groups`` would do so with those::

    step    user's pre-hooks: whole ──▶ ours: shards in the groups ──▶ the update ──▶ ours ──▶ user's post-hooks: whole
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_megatron.mesh.parts.packages import PACKAGE, comes_from

_Hook = Callable[..., Any]
_BEHIND = "_optimizer_step_post_hooks"
_TABLES = ("_optimizer_step_pre_hooks", _BEHIND)
_OF_ALL = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)


class SeenStepHooks:
    """Lets step hooks of the user see what other hooks see, until :meth:`remove`.

    Args:
        seeing: makes a function see that; given its owner and name there too.
    """

    def __init__(self, seeing: Callable[[_Hook, Any, str], _Hook]) -> None:
        self._seeing = seeing
        self._taken: list[tuple[OrderedDict[int, _Hook], int, _Seen]] = []

    def look(self, optimizers: Iterable[Optimizer]) -> None:
        """Take hooks that have come since, and let those behind a step run after this package's."""
        tables = [getattr(optimizer, name) for optimizer in optimizers for name in _TABLES]
        tables += _OF_ALL
        behind = {id(getattr(optimizer, _BEHIND)) for optimizer in optimizers} | {id(_global_optimizer_post_hooks)}
        for table in tables:
            new = [(key, hook) for key, hook in table.items() if not isinstance(hook, _Seen) and _is_users(hook)]
            for key, hook in new:
                owner, name = _owned(hook)
                run = _without_result(hook) if id(table) in behind else hook
                table[key] = seen = _Seen(hook, self._seeing(run, owner, name))
                self._taken.append((table, key, seen))
                table.move_to_end(key)
        for optimizer in optimizers:
            table = getattr(optimizer, _BEHIND)
            for key in [key for key, hook in table.items() if isinstance(hook, _Seen)]:
                table.move_to_end(key)

    def remove(self) -> None:
        """Give the hooks back."""
        taken, self._taken = self._taken, []
        for table, key, seen in taken:
            if table.get(key) is seen:
                table[key] = seen.own


class _Seen:
    """A hook that sees whole tensors.

    Attributes:
        own: the user's.
    """

    def __init__(self, own: _Hook, seeing: _Hook) -> None:
        self.own, self._seeing = own, seeing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._seeing(*args, **kwargs)


def _without_result(hook: _Hook) -> _Hook:
    """A hook behind a step, of which torch takes no result; one may be a list of what it was shown."""

    def without_result(*args: Any, **kwargs: Any) -> None:
        hook(*args, **kwargs)

    return without_result


def has_step_hooks(optimizers: Iterable[Optimizer]) -> bool:
    """Whether any of the user's hooks runs around steps of these optimizers."""
    tables = [getattr(optimizer, name) for optimizer in optimizers for name in _TABLES]
    tables += _OF_ALL
    return any(_is_users(hook) for table in tables for hook in table.values())


def _is_users(hook: _Hook) -> bool:
    return not comes_from(getattr(hook, "func", hook), PACKAGE, "torch")


def _owned(hook: _Hook) -> tuple[Any, str]:
    """An object that has the hook as a method, and its name there."""
    owner, name = getattr(hook, "__self__", None), getattr(hook, "__name__", "")
    if owner is not None and getattr(owner, name, None) == hook:
        return owner, name
    return types.SimpleNamespace(step_hook=hook), "step_hook"
