"""Shows the local width to code that reads its width from its input.

Many attention modules begin with ``batch, seq, width = x.size()`` and later view the output of the heads as [batch,
seq, width]. With local heads that width must be ``width / t``, but the projections still need all of ``x``. So the
module receives a view of the first ``width / t`` features, and a projection that is called with this view receives
``x`` instead. A trial shows whether the module uses its input in any other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class Narrowing:
    """Replaces an argument of a module by a narrower view, and the view by the whole tensor for its projections.

    Args:
        keys: positions or keywords of the arguments with the tensor.
        parts: size of the tensor group.
    """

    def __init__(self, keys: Sequence[int | str], parts: int) -> None:
        self._keys = keys
        self._parts = parts
        self._view: Tensor | None = None
        self._whole: Tensor | None = None

    def install(self, holder: nn.Module, columns: Sequence[nn.Module]) -> list[RemovableHandle]:
        """Add hooks to the module that takes the argument and to its projections.

        Args:
            holder: the module that takes the argument.
            columns: its projections.

        Returns:
            Handles that remove the hooks.
        """
        handles: list[RemovableHandle] = [
            holder.register_forward_pre_hook(self._hand_over_view, with_kwargs=True),
            holder.register_forward_hook(self._forget, always_call=True),
        ]
        handles += [column.register_forward_pre_hook(self._give_whole) for column in columns]
        return handles

    def _hand_over_view(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = self._keys[0]
        whole: Tensor = args[first] if isinstance(first, int) else kwargs[first]
        self._whole, self._view = whole, whole.narrow(-1, 0, whole.shape[-1] // self._parts)
        shown = tuple(self._view if index in self._keys else value for index, value in enumerate(args))
        return shown, {key: self._view if key in self._keys else value for key, value in kwargs.items()}

    def _give_whole(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        return (self._whole, *args[1:]) if args and args[0] is self._view and self._view is not None else None

    def _forget(self, module: nn.Module, args: Any, output: Any) -> None:
        self._view = self._whole = None
