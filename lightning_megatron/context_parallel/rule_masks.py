"""Masks of attention that are rules: computed for the queries and keys that meet, and never for all of them.

Hugging Face's models make their masks before their layers, [batch, 1, tokens, tokens], from a rule of two positions
(causal, a window, documents) and the padding: 16 GiB of booleans per sample at 128K tokens, on every rank. While tokens
are split, the function that makes them gives a `RuleMask`, which has that shape and is asked for tiles::

                    keys            attention of this rank's queries asks for the tiles of its runs,
               0 0 0 0 1 1 1 1      eager code (``scores + mask``) for the rows of its tokens,
    queries    ■ ⬚ ⬚ ⬚ ┌ ─ ─ ┐      anything else for all of it, which is made once, and counted
               ■ ■ ⬚ ⬚ │tile │
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_megatron.layers.all_here import all_tokens_asked
from lightning_megatron.layers.whole import WholeTensor
from lightning_megatron.mesh.replaced import Replacements
from lightning_megatron.mesh.torch_functions import METADATA, getters, name_of

Tile = Callable[[int, int, int, int], Tensor]
"""``tile(start, stop, low, high)``: the mask of these queries and these keys, [batch, 1, stop - start, high - low]."""

AT_A_TIME = 2**26
"""Entries of a mask that are there at a time, of each sample."""


class RuleMask(Tensor):
    """A mask [batch, 1, queries, keys], booleans or numbers that are added, without values until it is asked for them.

    Attributes:
        noted: how often functions needed all of it, by name.
    """

    noted: Counter[str]
    _tile: Tile
    _reads: list[tuple[Tensor, int]]
    _sees: dict[tuple[int, int, int, int], bool | None]
    _whole: Tensor | None = None
    _first = 0

    @classmethod
    def of(cls, tile: Tile, like: Tensor, dtype: torch.dtype, reads: Sequence[Tensor], noted: Counter[str]) -> Self:
        """The mask of a rule.

        Args:
            tile: computes any part of it.
            like: of its shape, and on its device.
            dtype: ``torch.bool``, or that of what is added to scores.
            reads: what the rule reads; not to be changed in place from now on.
            noted: counts the functions that need all of it.
        """
        made: Any = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=dtype, device=like.device)
        made._tile, made._reads, made.noted, made._sees = tile, [(each, each._version) for each in reads], noted, {}
        return cast(Self, made)

    def part(self, start: int, stop: int, low: int, high: int) -> Tensor:
        """Of the queries from ``start`` to ``stop`` and the keys from ``low`` to ``high``.

        Raises:
            RuntimeError: what the rule reads was changed in place.
        """
        if any(value._version != version for value, version in self._reads):
            raise RuntimeError(
                f"a tensor from which the attention mask of shape {tuple(self.shape)} follows (padding, positions or "
                "documents) was changed in place after the mask had been made, and with `context_parallel_size` above "
                "1 masks are computed where they are used; change a clone instead."
            )
        if self._whole is not None:
            return self._whole[..., start:stop, low:high]
        with torch.no_grad():
            return self._tile(start, stop, low, high)

    def sees(self, start: int, stop: int, low: int, high: int) -> bool | None:
        """Whether these queries see all of these keys (``True``) or none (``False``), or some (``None``).

        Numbers that are added say neither: of a row in which every key is hidden, all are seen alike.
        """
        if self.dtype != torch.bool:
            return None
        place = start, stop, low, high
        if self._whole is not None or place not in self._sees:  # a whole one may be written into
            seen = self.part(*place)
            count = int(seen.sum())
            self._sees[place] = None if 0 < count < seen.numel() else count > 0
        return self._sees[place]

    def rows(self, runs: Sequence[tuple[int, int]]) -> Tensor:
        """Of the queries in ``runs`` and all keys: [batch, 1, rows, keys]."""
        parts = [self.part(start, stop, 0, self.shape[-1]) for start, stop in runs]
        return torch.cat(parts, -2) if parts else self.part(0, 0, 0, self.shape[-1])

    def copied(self) -> RuleMask:
        """Another mask by the same rule."""
        return self.of(self._tile, self, self.dtype, [value for value, _ in self._reads], self.noted)

    def whole(self, why: str) -> Tensor:
        """All of it, as an ordinary tensor; made once."""
        if self._whole is None:
            self.noted[why] += 1
            self._whole = self.part(0, self.shape[-2], 0, self.shape[-1]).contiguous()
            self._first = self._whole._version
        return self._whole

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RuleMask(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.whole("deepcopy").clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole("pickle").__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _ASKED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if any(issubclass(kind, WholeTensor) for kind in types):
            return NotImplemented  # those take rows of it, or come back with what they have gathered
        if func in _SAME and _stays(args[0], args[1:], kwargs):
            return args[0]
        if func is Tensor.requires_grad_ and args[1:] == (False,):
            return args[0]
        if func in _COPIES and isinstance(args[0], RuleMask) and args[0]._whole is None:
            return args[0].copied()
        args, kwargs = tree_map(lambda value: given_whole(value, func), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _ALIASES:
            return args[0]
        args, kwargs = tree_map(lambda value: given_whole(value, func), (args, kwargs or {}))
        return func(*args, **kwargs)


def writes_of(mask: RuleMask | None) -> int:
    """How often a mask was written into, all of which was made."""
    return 0 if mask is None or mask._whole is None else mask._whole._version - mask._first


def check_unwritten(mask: RuleMask | None, writes: int) -> None:
    """Refuse a backward whose forward has seen another mask.

    Raises:
        RuntimeError: it was written into since there were ``writes``.
    """
    if mask is not None and writes_of(mask) != writes:
        raise RuntimeError(
            f"the attention mask of shape {tuple(mask.shape)} was changed in place after a layer had used it, which "
            "its gradient needs; change a clone instead."
        )


def given_whole(value: Any, func: Any) -> Any:
    """The ordinary tensor that a function which knows no rules is given in place of ``value``."""
    return value.whole(name_of(func)) if isinstance(value, RuleMask) else value


def _stays(mask: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a view, or a cast, is the mask itself."""
    if not isinstance(mask, RuleMask) or any(isinstance(value, Tensor) for value in tree_leaves((args, kwargs))):
        return False
    same = {mask.dtype, mask.device, str(mask.device)}
    if all(isinstance(value, torch.dtype | torch.device | str) for value in tree_leaves((args, kwargs))):
        return set(tree_leaves((args, kwargs))) <= same
    if len(args) != 1 or kwargs:
        return False
    entries = args[0] if isinstance(args[0], tuple) else (args[0],)
    if len(entries) > mask.ndim or sum(entry is Ellipsis for entry in entries) > 1:
        return False
    place = next((index for index, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    behind = entries[place + 1 :]
    sizes = [*mask.shape[:place], *([] if not behind else mask.shape[-len(behind) :])]
    given = [entry for entry in entries if entry is not Ellipsis]
    return all(isinstance(e, slice) and e.indices(n) == (0, n, 1) for e, n in zip(given, sizes, strict=True))


@contextlib.contextmanager
def masks_by_rule(noted: Counter[str]) -> Iterator[None]:
    """Let Hugging Face's models make rules of their masks inside, where that library is loaded.

    Args:
        noted: counts masks that were made, as ``""``, and functions that needed one whole, by name.
    """
    library: Any = sys.modules.get("transformers.masking_utils")
    interface = getattr(library, "ALL_MASK_ATTENTION_FUNCTIONS", None)
    if interface is None or not hasattr(interface, "_local_mapping"):
        yield
        return
    known = {function for name in ("sdpa_mask", "eager_mask") if (function := getattr(library, name, None))}
    instead = {
        name: functools.partial(_by_rule, interface[name], library.sdpa_mask, noted)
        for name in interface
        if interface[name] in known
    }
    with Replacements() as replaced:
        replaced.put(interface, "_local_mapping", {**interface._local_mapping, **instead})
        yield


def _by_rule(function: Any, by_booleans: Any, noted: Counter[str], *args: Any, **given: Any) -> Any:
    """The mask that ``function`` makes, as a rule where it depends on pairs of tokens only."""
    sizes = [given.get(name) for name in ("q_length", "kv_length")]
    starts = [given.get(name, 0) for name in ("q_offset", "kv_offset")]
    unlike = sizes[0] != sizes[1] or any(type(number) is not int for number in (*sizes, *starts))
    if args or unlike or all_tokens_asked():
        return function(*args, **given)
    # all but the pattern decides whether there is a mask; without it, one is a view of few numbers
    outline = {**given, "mask_function": _sees_all, "use_vmap": False}
    if function is not by_booleans:
        outline["allow_is_causal_skip"] = False
    like = by_booleans(**outline)
    if like is None:
        return None

    def tile(start: int, stop: int, low: int, high: int) -> Tensor:
        part = {
            **{"q_length": stop - start, "q_offset": starts[0] + start},
            **{"kv_length": high - low, "kv_offset": starts[1] + low},
        }
        return cast(
            Tensor, function(**{**given, **part, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
        )

    noted[""] += 1
    dtype = torch.bool if function is by_booleans else given.get("dtype", torch.float32)
    reads = [given.get("attention_mask"), *_read_by(given.get("mask_function"))]
    return RuleMask.of(tile, like, dtype, [each for each in reads if isinstance(each, Tensor)], noted)


def _sees_all(batch: Any, head: Any, query: Tensor, key: Any) -> Tensor:
    return query.new_ones((1, 1, 1, 1), dtype=torch.bool)


def _read_by(function: Any, known: set[int] | None = None) -> Iterator[Tensor]:
    """Tensors in the closures of a function, and of the functions in them."""
    known = set() if known is None else known
    if id(function) in known:
        return
    known.add(id(function))
    inside = [getattr(function, "func", None), getattr(function, "args", ()), getattr(function, "keywords", {})]
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not filled yet
            inside.append(cell.cell_contents)
    for value in tree_leaves(inside):
        if isinstance(value, Tensor):
            yield value
        elif callable(value):
            yield from _read_by(value, known)


_ASKED = METADATA | set(getters("requires_grad", "grad_fn", "is_leaf", "grad"))
_SAME = {Tensor.__getitem__, Tensor.to, Tensor.contiguous, Tensor.detach}
_COPIES = {Tensor.clone, torch.clone}
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
