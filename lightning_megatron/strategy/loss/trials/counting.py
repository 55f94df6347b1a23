"""Counts that a loss is divided by, or a choice of samples that it is a mean of, made by comparing floats.

They are as many for all samples of the batches that are tried, most likely, and fewer in a later one::

    keep = ~torch.isnan(x).any(1)                    the rows without a gap
    F.cross_entropy(z[keep], y[keep])                a mean over as many as there are

    right = each < 4.0                               what is no outlier
    (each * right).sum() / right.sum()

So they are looked for: what is computed of the result of a comparison alone is followed. Where it meets what has a
gradient, it matters how many numbers it was left with: those of samples add up, and a count of them does not::

    each * right          3 samples   2 samples   at once 5      by sample
    ... / right.sum()     1           1           1              of the batch

Rows that are chosen, computed and put back where they were are by sample too, as in a mixture whose experts take the
tokens with a weight above zero: ``out[on] = expert(x[on])``.

Of integers it matters what they are compared with: one process may count those that are something else. What is
computed of such comparisons is followed too, with their names (:mod:`.masks`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.mesh.autograd import graph_behind, in_graph
from lightning_megatron.mesh.parts.noted import TensorNotes
from lightning_megatron.mesh.parts.packages import PACKAGE, comes_from, is_library
from lightning_megatron.mesh.torch_functions import METADATA, frame_of_caller, line_of_frame
from lightning_megatron.strategy.loss.trials.calls_seen import (
    among,
    called_at,
    floats_among,
    functions_called,
    number_of,
    number_of_floats,
    tensors_among,
)
from lightning_megatron.strategy.loss.trials.decisions import Decided, decided_at, decided_later
from lightning_megatron.strategy.loss.trials.masks import Asked, SeenMasks, of_all, put_in
from lightning_megatron.strategy.loss.trials.taken_numbers import Taken, TakenFloat, TakenInt

_ORDERS = ("gt", "lt", "ge", "le", "greater", "less", "greater_equal", "less_equal")
_EQUAL = ("eq", "ne", "not_equal", "__eq__", "__ne__")
_FINITE = ("isnan", "isinf", "isfinite", "isposinf", "isneginf")
_WEIGHS, _IGNORES = 2, 4  # places of `weight` and `ignore_index` among the arguments of torch's losses


ORDERS = functions_called(*_ORDERS, *(f"__{name}__" for name in ("gt", "lt", "ge", "le")))
"""Comparisons of more and less."""

DECIDES = functions_called("__bool__", "item", "tolist", "__float__", "__int__", "numpy", "__array__")
"""Functions that take a number out of a tensor."""

_COMPARISONS = ORDERS | functions_called(*_EQUAL, *_FINITE, "isclose")
_SAME = functions_called(*_EQUAL)
_CHOOSE = functions_called("__getitem__", "masked_select", "nonzero", "argwhere")
_WHERE = functions_called("where")
_IS_IN = functions_called("isin")
_TABLES = _IS_IN | functions_called("__getitem__")
_MEANS = functions_called("nanmean", "nanmedian")
_REDUCE = functions_called("any", "all", "amax", "amin", "max", "min", "prod")
_BEGIN = _COMPARISONS | _TABLES | _MEANS | _REDUCE
_ITEM = functions_called("item", "tolist")
_ANY_AT_ALL = (0, 1)  # numbers that a count is compared with to see whether it is one of anything
_LOSSES = functions_called("cross_entropy", "nll_loss")
_INDEX = functions_called("__getitem__", "index_select", "gather", "take")
_CHOICE = functions_called("__getitem__", "index_select", "masked_select")
_PUTS = functions_called(
    "where", "masked_fill", "masked_fill_", "__setitem__", "index_put", "index_put_", "masked_scatter"
)
_PUT_BACK = functions_called(
    *("__setitem__", "index_put", "index_put_", "index_add", "index_add_", "index_copy", "index_copy_"),
    *("masked_scatter", "masked_scatter_"),
)
"""Functions whose first differentiable argument is what rows are put in, and whose others are the rows."""


@dataclass
class ChosenRows:
    """Rows that were chosen by what was computed of a comparison.

    Attributes:
        asked: by which they were.
        lost: whether anything was computed of them that has not a row for each, and was not put back.
        used: whether anything was computed of them at all.
        answered: whether an expert was given them that answers what other ranks have computed of the rows that were
            chosen, and sent, before.
    """

    asked: Asked
    lost: bool = False
    used: bool = False
    answered: bool = False


class Counting:
    """Follows them through a step's run on a piece of a batch.

    Args:
        module: the user's, whose own tensors are no numbers of a batch.
        decide: takes what the step's Python has decided something by.

    Attributes:
        nodes: of the graph, in which they met what has a gradient.
        seen: masks of integers, in all runs.
        constants: that integers were compared with.
        tables: vectors that losses weigh classes by, or that integers index.
    """

    def __init__(self, module: nn.Module, decide: Callable[[Asked, Decided], None]) -> None:
        self._module, self._decide, self._open = module, decide, False
        self._own: set[int] = set()
        self.nodes: list[tuple[Any, Asked]] = []
        self.seen = SeenMasks()
        self.constants: set[int] = set()
        self.tables: list[Tensor] = []
        self._reset()

    def _reset(self) -> None:
        self.nodes = []
        self._asked, self._rows = TensorNotes[Asked](), TensorNotes[ChosenRows]()
        self._choices: list[tuple[Any, ChosenRows]] = []
        self._put_back: list[Any] = []  # nodes

    def begin(self) -> None:
        """Before a run."""
        self._own.clear()  # tensors that are gone may have left their numbers to others
        self._reset()
        self.seen.begin()
        self._open = True

    def take_batch(self, tensors: Sequence[Tensor]) -> None:
        """Take note of the tensors that a run is given."""
        for tensor, mask in self.seen.of_batch(tensors):
            value = number_of(tensor) + tensor.numel()
            self._asked[tensor] = Asked(f"`{mask.name}`", tensor.numel(), value, frozenset([mask]))

    def end(self) -> None:
        """After it."""
        self._reset()
        self._open = False
        self.tables = [table for table in self.tables if self._is_own(table)]

    def met(self) -> list[tuple[Any, Asked]]:
        """Nodes of the graph in which what was asked met what has a gradient, but for rows that are put back, and for
        those of which nothing becomes, as an expert had its answer to them already.
        """
        rows = (following for node in self._put_back for following, _ in node.next_functions[1:])
        back = set(graph_behind(rows)) if self._choices else set()
        choices = [(node, each) for node, each in self._choices if each.used or not each.answered]
        return self.nodes + [(node, each.asked) for node, each in choices if each.lost or node not in back]

    def note(self, func: Any, found: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take note of a call of one of torch's functions; returns what it has found, or a number that is followed."""
        if func in METADATA:
            self._note_answered(args)
            return found
        given = [*args, *kwargs.values()]
        if func in _SAME or func in _LOSSES:
            self._note_constant(func, args, kwargs)
        if func in _LOSSES or func in _INDEX:
            self._note_table(func, args, kwargs)
        begins = func in _BEGIN and not is_library(frame_of_caller())  # `generate` asks for padding, and means no count
        tensors = list(tensors_among(given))
        self.seen.follow(func, found, args, tensors)
        if begins and func in _COMPARISONS and self._compares(found, given):
            self._asked[found] = Asked(
                called_at(func), found.numel(), number_of_floats(given) + 1.0, size=found.numel()
            )
            return found
        if begins and func in _COMPARISONS and self._compares_integers(found, tensors):
            self._asked[found] = self._mask_of(func, found, given, tensors)
            return found
        if begins and func in _REDUCE and (rows := self._rows_of_mask(found, tensors)) is not None:
            self._asked[rows] = self._mask_of(func, rows, given, tensors)
            return found
        if begins and func in _TABLES and self._looks_up(func, found, args):
            self._asked[found] = Asked(called_at(func), found.numel(), number_of(args[func not in _IS_IN]) + 1.0)
            return found
        if begins and func in _MEANS and isinstance(found, Tensor) and in_graph(found):
            self.nodes.append((found.grad_fn, Asked(called_at(func), found.numel(), number_of_floats(given))))
        into = args[0] if found is None else found
        if func in _PUT_BACK and in_graph(into) and any(self._known(given)):
            self._put_back.append(into.grad_fn)
            given = [each for each in (args[0], args[-1]) if self._rows_of(each) < 0]  # and not the numbers of rows
        asked = of_all(list(self._known(given)))
        if func in DECIDES and isinstance(args[0], Tensor):
            return self._take(func, found, args[0], asked)
        if func not in _PUT_BACK:
            self._note_rows(found, args)
        if asked is not None:
            counts = self._chooses(func, args) or _ignores(func, args, kwargs, asked)
            put = asked.put | put_in(args, kwargs) if func in _PUTS else asked.put
            asked = asked._replace(entries=1 if counts else asked.entries, put=put)
            if not self._begins_rows(func, found, given, asked):
                self._follow(asked, into)
        return found

    def _begins_rows(self, func: Any, found: Any, given: Sequence[Any], asked: Asked) -> bool:
        """Whether rows were chosen, or computed of some without gradients, that have gradients from here on."""
        if not isinstance(found, Tensor) or not found.ndim:
            return False
        rows = [each for each in among(given) if any(self._known([each]))]
        if func not in _CHOICE and not all(self._rows_of(each) == len(found) for each in rows):
            return False
        choice = self._rows[found] = ChosenRows(asked)
        if in_graph(found):
            self._choices.append((found.grad_fn, choice))
        return in_graph(found)

    def _rows_of(self, given: Any) -> int:
        """How many chosen rows there are; -1 where none were chosen."""
        return len(given) if isinstance(given, Tensor) and given in self._rows else -1

    def _note_rows(self, found: Any, args: tuple[Any, ...]) -> None:
        """Take note of what is computed of rows that were chosen."""
        for tensor in tensors_among(args) if len(self._rows) else ():
            choice = self._rows.get(tensor)
            if choice is not None:
                choice.used = True
            if choice is None or _sends_rows():
                continue
            for made in tensors_among([found]):
                if made.shape[:1] == tensor.shape[:1]:
                    self._rows[made] = choice
                elif in_graph(made):
                    choice.lost = True

    def _note_answered(self, args: tuple[Any, ...]) -> None:
        """Take note of rows of which an expert looks at the shape alone."""
        choice = self._rows.get(args[0]) if len(self._rows) and isinstance(args[0], Tensor) else None
        if choice is not None and _sends_rows():
            choice.answered = True

    def compared(self, number: Taken, other: Any, name: str, found: bool) -> None:
        """Take note of a comparison of a number that was taken out of a tensor, in Python."""
        frame = sys._getframe(3)
        whole = number.as_float.is_integer() and isinstance(other, (int, float)) and float(other).is_integer()
        kind = decided_at(frame) if self._open else ""
        asked = Asked(line := f"`{name}` in {line_of_frame(frame)}", 1, number.as_float)
        if number.graded or not whole or kind == "filter":
            self._decide(asked, kind)
        elif kind and number.followed and not isinstance(other, Taken) and other not in _ANY_AT_ALL:
            mask = self.seen.decided(f"{line} at {frame.f_lasti}", found)
            self._decide(asked._replace(masks=frozenset([mask])), kind)

    def _take(self, func: Any, found: Any, tensor: Tensor, asked: Asked | None) -> Any:
        """Take note of a number that leaves torch, followed where Python lets it be."""
        if asked is not None and asked.brought:  # a look at a mask, such as for a faster way
            asked = None
        if isinstance(found, bool):
            frame = frame_of_caller()
            kind = decided_at(frame)
            if kind == "filter":  # whatever of
                self._decide(Asked(f"a condition in {line_of_frame(frame)}", 1, 0.0), kind)
            elif asked is not None:
                self._decide(asked, kind)
        elif func not in _ITEM and not self._is_own(tensor):
            floats = tensor.is_floating_point()
            if asked is not None or (tensor.numel() == 1 and (floats or self.seen.is_followed(tensor))):
                number = asked or Asked(called_at(func), 1, number_of(tensor))
                beside = None if asked is not None else () if floats else _ANY_AT_ALL
                self._decide(number, decided_later(frame_of_caller(), beside))
        elif func in _ITEM and not self._is_own(tensor):
            followed = not tensor.is_floating_point() and self.seen.is_followed(tensor)
            return self._taken(found, asked, graded=tensor.requires_grad, followed=followed)
        return found

    def _taken(self, found: Any, asked: Asked | None, *, graded: bool, followed: bool) -> Any:
        """Numbers of Python's, in lists where there are several, which are followed."""
        if isinstance(found, list):
            return [self._taken(each, asked, graded=graded, followed=followed) for each in found]
        if isinstance(found, bool) or not isinstance(found, (float, int)):
            return found
        taken = TakenFloat if isinstance(found, float) else TakenInt
        return taken(found).by(self.compared, asked, graded=graded, followed=followed)

    def _rows_of_mask(self, found: Any, tensors: Sequence[Tensor]) -> Tensor | None:
        """A mask of rows that is found of one of integers, such as whether each has any; ``None`` for anything else."""
        rows = found[0] if isinstance(found, tuple) else found
        if not isinstance(rows, Tensor) or not rows.ndim or not rows.numel() or in_graph(rows):
            return None
        floats = any(not known.masks for known in self._known(tensors))
        if floats or not any(map(self.seen.is_followed, tensors)):
            return None
        return rows if rows.dtype == torch.bool or bool(((rows == 0) | (rows == 1)).all()) else None

    def _compares_integers(self, found: Any, tensors: Sequence[Tensor]) -> bool:
        """Whether integers of the batch are compared, or those that are computed of it."""
        masks = isinstance(found, Tensor) and found.dtype == torch.bool and found.numel() > 0
        floats = any(each.is_floating_point() or each.is_complex() for each in tensors)
        return masks and not floats and any(map(self.seen.is_followed, tensors))

    def _mask_of(self, func: Any, found: Tensor, given: Sequence[Any], tensors: Sequence[Tensor]) -> Asked:
        """A comparison of integers; that of what was put in by a mask is that mask."""
        known = of_all(list(self._known(given)))
        if known is not None and func in _SAME and any(type(each) is int and each in known.put for each in given):
            return known._replace(entries=found.numel())
        if known is not None and not found.ndim and any(each in (0, 1) for each in given if type(each) is int):
            return known  # whether any is left at all
        place, counts = frame_of_caller().f_lasti, func not in _REDUCE
        mask = self.seen.compared(line := called_at(func), place, found, tensors, counts=counts)
        masks = frozenset() if known is not None and not known.masks else frozenset([mask])
        masks = masks.union(known.masks) if known is not None else masks
        return Asked(line, found.numel(), sum(map(number_of, tensors)) + found.numel(), masks, size=found.numel())

    def _is_own(self, tensor: Tensor) -> bool:
        """Whether the module has it."""
        if not self._own:
            for child in self._module.modules():
                tables = child._parameters, child._buffers, vars(child)
                self._own |= {id(value) for table in tables for value in table.values() if isinstance(value, Tensor)}
        return id(tensor) in self._own

    def _follow(self, asked: Asked, found: Any) -> None:
        for tensor in tensors_among([found]):
            if in_graph(tensor):
                self.nodes.append((tensor.grad_fn, asked))
            else:
                self._asked[tensor] = asked._replace(entries=min(asked.entries, tensor.numel()))

    def _known(self, given: Sequence[Any]) -> Iterator[Asked]:
        for each in among(given):
            asked = self._asked.get(each) if isinstance(each, Tensor) else each.asked
            if asked is not None:
                yield asked

    def _chooses(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether it takes as many entries as there are of a kind."""
        if func in _WHERE:
            return len(args) == 1
        chosen = args if len(args) == 1 else args[1:]
        return func in _CHOOSE and any(
            each.dtype == torch.bool and each in self._asked for each in tensors_among(chosen)
        )

    def _looks_up(self, func: Any, found: Any, args: tuple[Any, ...]) -> bool:
        """Whether integers are asked for, in a list of some or in a table, and all of them are of one kind."""
        kinds = isinstance(found, Tensor) and found.dtype == torch.bool and found.ndim > 0 and found.numel() > 0
        if not kinds or (found != found.flatten()[0]).any():
            return False
        tensors = [each for each in args if isinstance(each, Tensor)]
        return len(tensors) == 2 and (
            func in _IS_IN or (self._is_own(tensors[0]) and not tensors[1].is_floating_point())
        )

    @staticmethod
    def _compares(found: Any, given: Sequence[Any]) -> bool:
        floats = floats_among(given)
        samples = isinstance(found, Tensor) and found.dtype == torch.bool and found.ndim > 0
        return samples and bool(floats) and not all(isinstance(each, nn.Parameter) for each in floats)

    def _note_constant(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func in _LOSSES:
            found = kwargs.get("ignore_index", args[_IGNORES] if len(args) > _IGNORES else None)
        else:
            integers = [each for each in args if isinstance(each, Tensor) and not each.is_floating_point()]
            found = next((each for each in args if type(each) is int), None) if integers else None
        if type(found) is int:
            self.constants.add(found)

    def _note_table(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [args[_WEIGHS] if len(args) > _WEIGHS else kwargs.get("weight")] if func in _LOSSES else list(args)
        tables = [x for x in given if isinstance(x, Tensor) and x.ndim == 1 and x.is_floating_point()]
        self.tables += [table for table in tables if not any(table is known for known in self.tables)]


def _ignores(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked) -> bool:
    """Whether a loss is a mean over the targets that a mask has left in."""
    if func not in _LOSSES or kwargs.get("reduction", "mean") != "mean":
        return False
    return kwargs.get("ignore_index", args[_IGNORES] if len(args) > _IGNORES else -100) in asked.put


def _sends_rows() -> bool:
    """Whether it is this package that puts rows together for the ranks of their experts; they all come back."""
    frame = sys._getframe(1)
    while frame.f_back is not None and comes_from(frame, "torch", __package__):
        frame = frame.f_back
    return comes_from(frame, f"{PACKAGE}.experts")
