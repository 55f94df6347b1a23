"""The hooks of a module as they were before a run of the user's step, to put them back where the run is undone.

Code that registers hooks in its first call notes on a module that it has, as Hugging Face models do to collect hidden
states: where that note is put back, the hooks have to go as well; and where a run has taken hooks off, they come back.
What else a run writes is put back by ``pipeline/elsewhere/undo.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_megatron.mesh.pickling import users_hook
from lightning_megatron.pipeline.elsewhere.containers import HOOKS

_TABLES = (
    *HOOKS,
    *("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)
Hooks = MutableMapping[int, Any]


class HookTables:
    """The tables in which a module and all modules in it keep their hooks.

    Args:
        root: the module.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._in_step = False
        self._found: list[Hooks] | None = None

    @contextmanager
    def found_once(self) -> Iterator[None]:
        """Around a step: the modules are walked through once, and not for each of its micro-batches and chunks."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step, self._found = False, None

    def full(self) -> list[Hooks]:
        """Those with hooks in them."""
        tables = self._found or self.find()
        if self._in_step:
            self._found = tables
        return [table for table in tables if table]

    def find(self) -> list[Hooks]:
        """All tables, empty ones too. It runs in every step, so it walks through the modules by hand, in few calls."""
        modules, known = [self.root], {self.root}
        for module in modules:  # which grows
            for child in module._modules.values() if module._modules else ():
                if child is not None and child not in known:
                    known |= {child}
                    modules += (child,)
        return [table for module in modules for table in map(module.__dict__.__getitem__, _TABLES)]


class KeptHooks:
    """Hooks of modules as they were.

    Args:
        tables: of the modules that may get hooks, or lose them.
        lost: whether hooks that are taken off are put back, and not just those that are added.
    """

    def __init__(self, tables: HookTables, *, lost: bool = True) -> None:
        self._root, self._next = tables.root, RemovableHandle.next_id
        self._full = [(table, dict(table)) for table in tables.full()] if lost else []

    def put_back(self) -> None:
        """Restore the hooks; those of this package are left unchanged."""
        if RemovableHandle.next_id != self._next:
            for module in self._root.modules():
                added = [
                    key for name in HOOKS for key, hook in getattr(module, name).items() if self._is_added(key, hook)
                ]
                for name in _TABLES if added else ():
                    for key in added:
                        getattr(module, name).pop(key, None)
        for table, hooks in self._full:
            if any(key not in table and users_hook(hook) is not None for key, hook in hooks.items()):
                later = {key: hook for key, hook in table.items() if key not in hooks}
                here = {key: hook for key, hook in hooks.items() if key in table or users_hook(hook) is not None}
                table.clear()
                table.update(here | later)

    def _is_added(self, key: int, hook: Any) -> bool:
        return key >= self._next and users_hook(hook) is not None
