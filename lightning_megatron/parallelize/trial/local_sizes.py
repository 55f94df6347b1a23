"""Shows sizes of one rank to a module's own code, and those of the model to everybody else.

Attention code reads its number of heads from an attribute, which must be that of one rank's heads after the split. Code
elsewhere that reads the same attribute means the model: ``x + self.attn(x) / self.attn.n_head`` in the layer around, a
step that scales its loss, a learning rate by the width. So attributes are local while a module that was found to read
them runs, and not a moment longer::

    layer.forward           attn.n_head = 16
      attn(x)               attn.n_head = 16 / t      also where a recomputation calls it
      x / attn.n_head       attn.n_head = 16

Where a step calls a method of a module and not the module, as ``net.encode(x)``, sizes are local while that method
runs, if the run on which the plan was tried has reached the module's projections through the same one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

from torch import nn

from lightning_megatron.mesh.replaced import Replaced, has_other_method, own_method


class LocalSizes:
    """Attributes of a module that have other values while it, or a module around it, is called.

    Args:
        owner: the module.
        local: by attribute, the value that its code reads.
    """

    def __init__(self, owner: nn.Module, local: Mapping[str, int]) -> None:
        self._owner, self._local = owner, dict(local)
        self._whole: dict[str, Any] = {}
        self._depth = 0

    def install(
        self, around: Iterable[nn.Module], columns: Iterable[nn.Module] = (), methods: Iterable[str] = ()
    ) -> None:
        """Add hooks to the module and to others, in whose calls the values are local as well.

        Args:
            around: the others.
            columns: layers whose outputs are split, and which no code may call where the values are whole.
            methods: names of methods of the module in which the values are local too.
        """
        for name in methods:
            if not has_other_method(self._owner, name):
                self._owner.__dict__[name] = Replaced(self._owner, name, self._around(own_method(self._owner, name)))
        for column in columns:
            column.register_forward_pre_hook(self._check)
        for module in {id(each): each for each in (self._owner, *around)}.values():
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave, always_call=True)

    def _check(self, column: nn.Module, args: Any) -> None:
        if self._depth == 0:
            names = " and ".join(f"`{name}`" for name in self._local)
            raise RuntimeError(
                f"A method of {type(self._owner).__name__} is run without a call of the module, and computes with the "
                f"heads of one rank by {names} of all. Call the module (`forward`) and not the method, or leave its "
                "layers out of `tensor_parallel_plan`."
            )

    def _around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def calling(*args: Any, **kwargs: Any) -> Any:
            self._enter()
            try:
                return method(*args, **kwargs)
            finally:
                self._leave()

        return calling

    def _enter(self, *_: Any) -> None:
        if self._depth == 0:
            self._whole = {name: getattr(self._owner, name) for name in self._local}
            self._write(self._local)
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:  # what its code has set anew stays
            self._write({name: self._whole[name] for name, value in self._local.items() if self._reads(name) == value})

    def _reads(self, name: str) -> Any:
        return getattr(self._owner, name)

    def _write(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self._owner, name, value)


def note_methods(owner: nn.Module, layers: Iterable[nn.Module], found: set[str]) -> None:
    """Note which methods of a module, other than ``forward``, lead to calls of layers.

    Args:
        owner: the module, a copy that is about to run.
        layers: layers of the copy, which get a hook.
        found: gets the names of the methods.
    """

    def note(layer: nn.Module, args: Any) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            is_own = bool(code.co_argcount) and frame.f_locals.get(code.co_varnames[0]) is owner
            if is_own and not hasattr(nn.Module, code.co_name) and callable(getattr(type(owner), code.co_name, None)):
                found.add(code.co_name)
            frame = frame.f_back

    for layer in layers:
        layer.register_forward_pre_hook(note)


def keep_returned(owner: nn.Module, methods: Iterable[str], kept: list[Any]) -> None:
    """Keep what methods of a copy that is about to run return.

    Args:
        owner: the module that has the methods.
        methods: their names.
        kept: gets what they return.
    """

    def keeping(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def calling(*args: Any, **kwargs: Any) -> Any:
            kept.append(method(*args, **kwargs))
            return kept[-1]

        return calling

    for name in sorted(methods):
        owner.__dict__[name] = keeping(getattr(owner, name))


def by_owner(attributes: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    """Local values of a region's attributes, by the name of the module that has them."""
    owners: dict[str, dict[str, int]] = {}
    for (owner, attribute), value in attributes.items():
        owners.setdefault(owner, {})[attribute] = value
    return owners
