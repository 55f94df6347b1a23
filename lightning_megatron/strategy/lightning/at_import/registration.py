"""Makes ``Trainer(strategy="megatron")`` work without importing Lightning before the user does.

If Lightning is there already, the name is registered at once; otherwise as soon as its strategies have been imported.
What is registered is a factory, so that torch and the strategy load only when a Trainer asks for it.

Lightning asks no entry point for strategies (only for callbacks, after the strategy), so a finder on ``sys.meta_path``
waits for its modules. It takes itself away when they come; :func:`forget` takes it away when they do not.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_megatron.strategy.lightning.at_import import load_directories

_STRATEGIES, _COMMANDS = "lightning.pytorch.strategies", "lightning.pytorch.cli"
_NAMES = ("megatron", "megatronstrategy")  # the second is what Lightning makes of the class's name on a command line


def register_when_lightning_is_imported() -> None:
    """Register the strategy's name, and teach the command line, now or right after Lightning's modules are imported."""
    for awaited, act in ((_STRATEGIES, _register), (_COMMANDS, _teach)):
        if awaited in sys.modules:
            act(sys.modules[awaited])
        elif not any(isinstance(finder, _AfterImport) and finder.awaited == awaited for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterImport(awaited, act))


def forget() -> None:
    """Undo all that importing this package has changed outside of it: finders, names, and functions of Lightning."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _AfterImport)]
    registry: Any = getattr(sys.modules.get(_STRATEGIES), "StrategyRegistry", {})
    for name in _NAMES:
        if name in registry and registry[name]["strategy"] is _build:
            registry.remove(name)
    load_directories.forget()


def _register(strategies: ModuleType) -> None:
    registry = strategies.StrategyRegistry
    for name in _NAMES:
        if name not in registry:
            registry.register(name, _build, description="Megatron-style 3D parallelism (lightning_megatron)")
    load_directories.read_directories()


def _teach(command_line: ModuleType) -> None:
    load_directories.teach_command_line()


def _build(**options: Any) -> Any:
    from lightning_megatron.strategy.strategy import MegatronStrategy

    return MegatronStrategy(**options)


class _AfterImport(MetaPathFinder):
    """Finds one of Lightning's modules as Python would, and acts on it once it has run."""

    def __init__(self, awaited: str, act: Callable[[ModuleType], None]) -> None:
        self.awaited = awaited
        self._act = act

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Wrap the loader of the one module waited for; everything else is left to the other finders."""
        if name != self.awaited:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ActingLoader(spec.loader, self._act)
        return spec


class _ActingLoader(Loader):
    """A loader that acts on a module after running it."""

    def __init__(self, loader: Loader, act: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._act = act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as the wrapped loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then act."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._act(module)
