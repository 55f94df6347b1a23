"""Answers the calls of one module before torch runs its hooks.

Torch runs the hooks of a module, and then its ``forward``, in ``_call_impl``. A wrapper of ``forward`` (:mod:`.stack`)
therefore comes too late for what concerns the hooks as well. An entry stands in the place of ``_call_impl``::

    module(x) ─▶ entry ─▶ hooks ─▶ wrappers ─▶ own forward
                   └────▶ something else: another stage computes it
"""

from __future__ import annotations

from typing import Any

from torch import nn


class Entry:
    """Takes the calls of one module; subclasses define :meth:`enter`.

    Attributes:
        module: the module.
    """

    module: Any

    def enter(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call of the module."""
        raise NotImplementedError

    def open(self) -> None:
        """Take the calls from now on."""
        self.module.__dict__["_call_impl"] = self.enter  # an attribute, which `torch.compile` would pass on

    def close(self) -> None:
        """Let torch take them again."""
        self.module.__dict__.pop("_call_impl", None)

    def run_hooked(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as torch does: its hooks and its ``forward``."""
        return type(self.module)._call_impl(self.module, *args, **kwargs)


def has_entry(module: nn.Module) -> bool:
    """Whether the calls of a module are taken by an entry."""
    return "_call_impl" in module.__dict__
