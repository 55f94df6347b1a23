"""Hooks that user code registers on modules while a run is under way.

What stages tell each other of layers, and what is known of a loss, was found out in a step of the same hooks. A hook
that comes later may keep numbers, or change outputs, that nobody has asked for::

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 100:
            self.layers[0].register_forward_hook(lambda m, x, y: self.seen.append(y.norm()))

So steps look whether some have come. Torch numbers all hooks of a process: where it has given out no number since,
nothing is gone over. Hooks of code that was met on the same module before are nothing new.
"""

from __future__ import annotations

import types
from collections.abc import Hashable, Iterator
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_megatron.pipeline.elsewhere.containers import GLOBAL_HOOKS, HOOKS, function_of, users_hook


class RegisteredHooks:
    """Looks for hooks that have come since it looked last.

    Args:
        module: the user's, on whose parts they may be registered.

    Attributes:
        others: whether any have, as of the latest :meth:`look`: the same function anew, too.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(module.modules())
        self._numbers, self._keys, self._kinds = -1, set[Hashable](), set[Hashable]()
        self.others = False
        self.look()

    def look(self) -> bool:
        """Whether hooks have come whose code was not met on their modules before."""
        self.others = False
        if RemovableHandle.next_id == self._numbers:
            return False
        self._numbers = RemovableHandle.next_id
        found = dict(self._registered())
        self.others, self._keys = not self._keys.issuperset(found), set(found)
        new = not self._kinds.issuperset(found.values())
        self._kinds.update(found.values())
        return new

    def _registered(self) -> Iterator[tuple[Hashable, Hashable]]:
        """Where and under which number a hook is registered, and where and of which code it is."""
        tables = ((id(part), name, getattr(part, name)) for part in self._parts for name in HOOKS)
        for place, name, hooks in (*tables, *((0, str(at), hooks) for at, hooks in enumerate(GLOBAL_HOOKS))):
            for key, hook in hooks.items() if hooks else ():
                if (given := users_hook(hook)) is not None:
                    yield (place, name, key), (place, name, _code(given))


def _code(hook: Any) -> Any:
    """What stays the same where a function is made anew, as a closure is for each step."""
    hook = getattr(hook, "func", hook)
    function = function_of(getattr(hook, "__func__", hook))
    return function.__code__ if isinstance(function, types.FunctionType) else type(hook)
