"""Shows sizes of one rank to a module's own code, and those of the model to everybody else.

Attention code reads its number of heads from an attribute, which must be that of one rank's heads after the split. Code
elsewhere that reads the same attribute means the model: ``x + self.attn(x) / self.attn.n_head`` in the layer around, a
step that scales its loss, a learning rate by the width. So attributes are local while a module that was found to read
them runs, and not a moment longer::

    layer.forward           attn.n_head = 16
      attn(x)               attn.n_head = 16 / t      also where a recomputation calls it
      x / attn.n_head       attn.n_head = 16
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn


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

    def install(self, around: Iterable[nn.Module], columns: Iterable[nn.Module] = ()) -> None:
        """Add hooks to the module and to others, in whose calls the values are local as well.

        Args:
            around: the others.
            columns: layers whose outputs are split, and which no code may call where the values are whole.
        """
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

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._depth == 0:
            self._whole = {name: getattr(self._owner, name) for name in self._local}
            self._write(self._local)
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0:  # what its code has set anew stays
            self._write({name: self._whole[name] for name, value in self._local.items() if self._reads(name) == value})

    def _reads(self, name: str) -> Any:
        return getattr(self._owner, name)

    def _write(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self._owner, name, value)


def by_owner(attributes: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    """Local values of a region's attributes, by the name of the module that has them."""
    owners: dict[str, dict[str, int]] = {}
    for (owner, attribute), value in attributes.items():
        owners.setdefault(owner, {})[attribute] = value
    return owners
