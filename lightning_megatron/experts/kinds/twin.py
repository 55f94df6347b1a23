"""Modules whose forward is led through an exchange of tokens, and are otherwise what their author wrote.

The class of such a module becomes a subclass of its own that differs in ``forward`` alone; parameters, names and
attributes stay. What leads the forward is kept beside the module, so that copies of a module have it too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, cast

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from lightning_megatron.mesh.marks import Marks


class Leader(Protocol):
    """Runs a module's forward on the tokens of several ranks."""

    def run(self, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of ``module``, whose forward as its author wrote it is ``own``."""


class Led:
    """Kept with a module: what leads its forward."""

    def __init__(self, leader: Leader) -> None:
        self.leader = leader


def lead(module: nn.Module, leader: Leader) -> None:
    """Let ``leader`` answer the calls of ``module``."""
    Marks.of(module).put(Led(leader))
    module.__class__ = _twin(type(module))


def is_elsewhere(module: nn.Module, arguments: Any) -> bool:
    """Whether a call only asks for shapes, because another pipeline stage has the module; nothing may be sent then.

    In a rehearsal the weights that are here have no numbers either, and such a call is an ordinary one.
    """
    weight = next(module.parameters(), None)
    fake = any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(arguments))
    return weight is None or (fake and not isinstance(weight, FakeTensor))


def is_led(module: nn.Module) -> bool:
    """Whether something leads the calls of a module."""
    return Marks.of(module).get(Led) is not None


def shows_whole(module: nn.Module) -> bool:
    """Whether something leads the calls of a module that puts whole weights in the place of parts meanwhile."""
    led = Marks.of(module).get(Led)
    return led is not None and getattr(led.leader, "shows_whole", False)


_TWINS: dict[type, type[nn.Module]] = {}


def _twin(cls: type[nn.Module]) -> type[nn.Module]:
    if cls not in _TWINS:
        _TWINS[cls] = _make_twin(cls)
    return _TWINS[cls]


def _make_twin(cls: type[nn.Module]) -> type[nn.Module]:
    own: Callable[..., Any] = cls.forward

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        led = cast(Led, Marks.of(self).get(Led))
        return led.leader.run(self, functools.partial(own, self), args, kwargs)

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "_twin_of": cls, "forward": forward})
