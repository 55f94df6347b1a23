"""A checkpoint's ``state_dict`` for ``on_load_checkpoint``: read when a hook touches it, by slices where none does.

A hook that drops, renames or changes entries means whole tensors, as one process loads them; a rank wants only its
part. So the hook gets a dict that knows every entry and has none. What it takes out is read whole; what is left
untouched is read later, each rank its own part::

    state["head.weight"] = state.pop("old_head.weight") * 2      read whole, on every rank
    state["layers.0.weight"]                                     never asked for: this rank's slice, when it is loaded
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.checkpoints.state.stored import Kinds

_MISSING = object()


class StateOnDisk(dict[str, Any]):
    """A dict of tensors of which each is read when it is first asked for.

    Args:
        kinds: shape and type of tensors in the checkpoint.
        names: of the tensors in the dict -> the name that each is stored under.
        read: reads one tensor, by its stored name.
    """

    def __init__(self, kinds: Kinds, names: Mapping[str, str], read: Callable[[str], Any]) -> None:
        super().__init__()
        self._kinds, self._read, self._stored = kinds, read, dict(names)
        for name in self._stored:
            super().__setitem__(name, _MISSING)

    @property
    def untouched(self) -> dict[str, str]:
        """By name, the stored name of what nobody has asked for."""
        return {name: stored for name, stored in self._stored.items() if super(StateOnDisk, self).get(name) is _MISSING}

    def kinds_now(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and type of every tensor that the dict has now; reads nothing."""
        left = {name: self._kinds[stored] for name, stored in self.untouched.items()}
        own = ((name, self[name]) for name in self if name not in left)
        return left | {name: (value.shape, value.dtype) for name, value in own if isinstance(value, Tensor)}

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if value is _MISSING:
            value = self._read(self._stored[name])
            super().__setitem__(name, value)
        return value

    def __iter__(self) -> Iterator[str]:  # with a method of its own, `dict(state)` asks for the values one by one
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or ``default``."""
        try:
            return self[name]
        except KeyError:
            return default

    def setdefault(self, name: str, default: Any = None) -> Any:
        """The value, which is ``default`` from now on if there was none."""
        if name not in self:
            self[name] = default
        return self[name]

    def pop(self, name: str, *default: Any) -> Any:
        """The value, which is taken out."""
        if name not in self:
            return super().pop(name, *default)
        value = self[name]
        del self[name]
        return value

    def popitem(self) -> tuple[str, Any]:
        """The last name and its value, which are taken out."""
        name = next(reversed(list(self)))
        return name, self.pop(name)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """All values."""
        return ValuesView(self)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """All names and values."""
        return ItemsView(self)

    def copy(self) -> dict[str, Any]:
        """A plain dict with everything in it."""
        return {name: self[name] for name in self}

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return {name: self[name].clone() if isinstance(self[name], Tensor) else self[name] for name in self}

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)
