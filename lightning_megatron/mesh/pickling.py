"""Parts of a divided module belong to one rank, and are not pickled.

A layer that is split over ranks, or that another pipeline stage has, means something beside the other ranks' parts
only: a pickle of it, loaded in another process, would be taken for the model. So whoever pickles a divided module, or
a Trainer that has it, is told what to save instead. `copy.deepcopy` works: the copy is divided like the module.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

from lightning_megatron.mesh.parts.packages import PACKAGE, comes_from


def refuse_pickling(what: str) -> NoReturn:
    """Raise the error that says what to do.

    Raises:
        PicklingError: always.
    """
    raise pickle.PicklingError(
        f"{what} is this rank's part of a module that is divided over ranks (`tensor_parallel_size` or "
        "`pipeline_parallel_size` above 1), which cannot be pickled, nor can a Trainer that has it: it would be a part "
        "of the model only. Save with `trainer.save_checkpoint(...)`, or take all weights by "
        "`strategy.full_state_dict()` and load them into an ordinary module."
    )


class OfOneRank:
    """Mixin of what layers hold of this rank: deep copies of a layer share it, unless a subclass says otherwise."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_pickling(f"A {type(self).__name__}")


class HeldGroup:
    """A process group that an object holds: deep copies of the object share it, and pickling drops it.

    Args:
        group: the group; ``None`` for none, as in what was pickled.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldGroup:
        return self

    def __reduce__(self) -> Any:
        return HeldGroup, ()


class RankHook(OfOneRank):
    """A hook on a layer that is split.

    Args:
        function: the hook.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the hook."""
        return self._function(*args, **kwargs)


class AroundHook:
    """Base of what runs in the place of a hook of the user, and is taken for it: copies and pickles are the user's.

    Attributes:
        given: the user's hook.
    """

    given: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.given

    def __reduce__(self) -> Any:
        return _same, (self.given,)


def users_hook(hook: Any) -> Any:
    """A registered hook as the user's code, or another library's, gave it; ``None`` for one of this package's own."""
    given = hook
    while isinstance(given, AroundHook):
        given = given.given
    code = given.func if isinstance(given, functools.partial) else given
    return None if comes_from(code, PACKAGE) else given


def _same(hook: Any) -> Any:
    return hook


class OtherClass:
    """Mixin of modules whose class has been changed: copied as they were, but not pickled."""

    def __copy__(self) -> Any:
        own = getattr(super(), "__copy__", None)
        return own() if own is not None else self._copied(lambda state: state, {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        own = getattr(super(), "__deepcopy__", None)
        return own(memo) if own is not None else self._copied(lambda state: copy.deepcopy(state, memo), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_pickling(f"A {type(self).__name__}")

    def _copied(self, take: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
        """A copy made of what the class's own ``__reduce_ex__`` gives, as `copy` does."""
        reduced: Any = super().__reduce_ex__(4)
        make, arguments, *rest = reduced
        made = memo[id(self)] = make(*arguments)
        state = take(rest[0]) if rest else None
        if hasattr(made, "__setstate__"):
            made.__setstate__(state)
        elif state is not None:
            made.__dict__.update(state)
        return made
