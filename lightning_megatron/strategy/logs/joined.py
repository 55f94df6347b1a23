"""How what a step of evaluation gives for micro-batches comes together as what it gives for their batch.

Some neighbouring micro-batches are run apart and together, and what the step returns and logs is compared::

    rows        torch.cat of the parts, or their entries one after the other      predictions [b, V], texts
    means       weighted by samples, or by what is no padding (:class:`Counted`)    a mean loss
    sum         of the parts                                                        a number of correct answers
    max, min    of the parts
    same, zero  in all of them: what else it may be does not show yet               a learning rate; nothing correct

Ways that a later trial rules out stay ruled out. A batch that gives what was not foreseen, such as parts that differ
where they were the same, is run again, whole, and the next one is tried anew.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.strategy.logs.step_logs import LogRecorder

Path = tuple[Any, ...]
Weights = Mapping[Any, Sequence[float]]
"""Way to weigh ("sizes", or what to count) -> weight of each part."""

_OTHERS = ("sum", "max", "min")
_ALIKE = ("zero", "same")
_PLAIN = (str, bytes, bool, type(None))


class NotJoinable(Exception):
    """Raised where a batch's result is not made of its parts' results; says which value."""


class Unforeseen(Exception):
    """Parts of a batch give something that no trial has seen."""


class Joined:
    """Facts about one kind of step.

    Attributes:
        ways: by the place of a value, in which ways those of the parts may come together; none of them was ruled out.
    """

    def __init__(self) -> None:
        self.ways: dict[Path, list[Any]] = {}

    def learn(self, parts: Sequence[Any], whole: Any, weights: Weights, tolerance: float, path: Path = ()) -> None:
        """Compare what parts of a batch give with what they give at once.

        Args:
            parts: a nest for each.
            whole: a nest.
            weights: of the parts.
            tolerance: relative, of numbers.
            path: where the nest is.

        Raises:
            NotJoinable: they cannot be put together.
        """
        again: Callable[[Any, Any, Any], None] = lambda key, each, all_of_it: self.learn(  # noqa: E731
            each, all_of_it, weights, tolerance, (*path, key)
        )
        items = _items(whole)
        if items is not None:
            inside = [_items(part) if type(part) is type(whole) else None for part in parts]
            if any(each is None or each.keys() != items.keys() for each in inside):
                raise NotJoinable(spelled(path))
            for key, value in items.items():
                again(key, [(each or {})[key] for each in inside], value)
        elif isinstance(whole, (list, tuple)):
            if any(type(part) is not type(whole) for part in parts):
                raise NotJoinable(spelled(path))
            ways = ["items"] if all(len(part) == len(whole) for part in parts) else []
            rows = [entry for part in parts for entry in part]
            if type(whole) is list and len(rows) == len(whole):
                ways += ["rows"] if all(_close(a, b, tolerance) for a, b in zip(rows, whole, strict=True)) else []
            self._narrow(path, ways)
            for index, value in enumerate(whole if self.ways[path][0] == "items" else ()):
                again(index, [part[index] for part in parts], value)
        elif isinstance(whole, (*_PLAIN, Tensor, int, float)) and all(_same_kind(part, whole) for part in parts):
            self._narrow(path, list(_ways(parts, whole, weights, tolerance)))
        else:
            raise NotJoinable(f"{spelled(path)}, a {type(whole).__name__}" if path else f"a {type(whole).__name__}")

    def _narrow(self, path: Path, ways: list[Any]) -> None:
        known = self.ways.get(path)
        self.ways[path] = ways if known is None else [way for way in known if way in ways]
        if not self.ways[path]:
            raise NotJoinable(spelled(path))

    def open(self) -> Iterator[Path]:
        """Values with several ways left, some of which trials could rule out: a sum that is also the largest part."""
        for path, ways in self.ways.items():
            if ways and ways[0] not in _ALIKE:
                kinds = {way if isinstance(way, str) and way != "sizes" else "mean" for way in ways}
                if len(kinds) > 1 and kinds != {"items", "rows"}:
                    yield path

    def counted(self) -> set[Any]:
        """Ways to weigh means of which more than one remains for some value."""
        rest = [[way for way in ways if _weighs(way)] for ways in self.ways.values() if ways and ways[0] not in _ALIKE]
        return {way for ways in rest if len(ways) > 1 for way in ways}

    def join(self, parts: Sequence[Any], weights: Weights, path: Path = ()) -> Any:
        """Result of the batch, from the results of its parts.

        Args:
            parts: a nest for each, in order.
            weights: of the parts.
            path: where the nest is.

        Raises:
            Unforeseen: no trial has seen such values.
        """
        first = parts[0]
        items = _items(first)
        if any(type(part) is not type(first) for part in parts):
            raise Unforeseen(spelled(path))
        if items is not None:
            inside = [_items(part) or {} for part in parts]
            if any(each.keys() != items.keys() for each in inside):
                raise Unforeseen(spelled(path))
            return _rebuilt(first, {k: self.join([e[k] for e in inside], weights, (*path, k)) for k in items})
        ways = self.ways.get(path)
        if ways is None:
            raise Unforeseen(spelled(path))
        if isinstance(first, (list, tuple)):
            if ways[0] == "rows":
                return [entry for part in parts for entry in part]
            if any(len(part) != len(first) for part in parts):
                raise Unforeseen(spelled(path))
            found = [self.join([part[i] for part in parts], weights, (*path, i)) for i in range(len(first))]
            return type(first)(*found) if hasattr(first, "_fields") else type(first)(found)
        try:
            return _combined(ways[0], parts, weights)
        except (Unforeseen, RuntimeError) as error:
            raise Unforeseen(spelled(path)) from error


@dataclasses.dataclass
class Joint:
    """How the micro-batches of one batch come together.

    Attributes:
        joined: what is known of the step.
        weights: of the micro-batches.
    """

    joined: Joined
    weights: Weights

    def logs(self, recorder: LogRecorder) -> dict[tuple[str, int], tuple[Any, Any]]:
        """Value and batch size of every number that was logged, by key and how often it was logged before.

        Raises:
            Unforeseen: no trial has seen such values.
        """
        parts = recorder.numbers(len(self.weights["sizes"]))
        found = self.joined.join([{"log": part} for part in parts], self.weights)["log"]
        return {(name, count): pair for name, each in found.items() for count, pair in each.items()}

    def output(self, outputs: Sequence[Any]) -> Any:
        """Result of the step for the batch.

        Raises:
            Unforeseen: no trial has seen such values.
        """
        return self.joined.join([{"output": output} for output in outputs], self.weights)["output"]


def spelled(path: Path) -> str:
    """The place of a value in words."""
    if not path:
        return "the result"
    kind, *at = path
    if kind == "log":
        return f"what it logs as `{at[0]}`" if at else "what it logs"
    return "the result's " + "".join(f"[{key!r}]" for key in at) if at else "the result"


def _items(value: Any) -> dict[Any, Any] | None:
    """The entries of a mapping or dataclass by key."""
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return None


def _rebuilt(original: Any, items: dict[Any, Any]) -> Any:
    if isinstance(original, Mapping):
        rebuild: Callable[[dict[Any, Any]], Any] = type(original)
        return items if rebuild is dict else rebuild(items)
    return dataclasses.replace(original, **items)


def _same_kind(part: Any, whole: Any) -> bool:
    if isinstance(whole, Tensor):
        return isinstance(part, Tensor) and part.dtype == whole.dtype and part.ndim == whole.ndim
    return type(part) is type(whole)


def _weighs(way: Any) -> bool:
    return way == "sizes" or not isinstance(way, str)


def _ways(parts: Sequence[Any], whole: Any, weights: Weights, tolerance: float) -> Iterator[Any]:
    """All ways in which the values of the parts give that of the whole, those that show least first."""
    if isinstance(whole, _PLAIN):
        if all(part == whole for part in parts):
            yield "same"
        return
    one, *tensors = (torch.as_tensor(value) for value in (whole, *parts))
    if one.ndim and sum(len(part) for part in tensors) == len(one):
        alike = all(part.shape[1:] == one.shape[1:] for part in tensors)
        if alike and _close(torch.cat(tensors), one, 10 * tolerance):
            yield "rows"
    if any(part.shape != one.shape for part in tensors):
        return
    if not any(bool(value.any()) for value in (one, *tensors)):
        yield "zero"
    if all(_close(part, one, tolerance) for part in tensors):
        yield "same"
    means = [way for way, of in weights.items() if one.is_floating_point() and any(of)]
    for way in (*means, *(_OTHERS if one.dtype is not torch.bool else ())):
        if _close(torch.as_tensor(_combined(way, tensors, weights)), one, tolerance):
            yield way


def _combined(way: Any, parts: Sequence[Any], weights: Weights) -> Any:
    """The value of the whole.

    Raises:
        Unforeseen: the parts differ where they were the same.
    """
    first = parts[0]
    if way in _ALIKE:
        tensors = [torch.as_tensor(part) for part in parts] if not isinstance(first, _PLAIN) else []
        zero = way == "zero" and any(bool(part.any()) for part in tensors)
        if zero or not all(_close(part, first, 1e-12) for part in parts):
            raise Unforeseen
        return first
    if isinstance(first, Tensor) and way == "rows":
        return torch.cat(list(parts))
    if way == "sum":
        return functools.reduce(operator.add, parts)
    if way in _OTHERS:
        if isinstance(first, Tensor):
            stacked = torch.stack(list(parts))
            return stacked.amax(0) if way == "max" else stacked.amin(0)
        return max(parts) if way == "max" else min(parts)
    weigh = weights[way]
    total = sum(weigh)
    if not total:
        raise Unforeseen
    scaled = (part * (weight / total) for part, weight in zip(parts, weigh, strict=True))
    return functools.reduce(operator.add, scaled)


def _close(one: Any, other: Any, tolerance: float) -> bool:
    """Whether two values are the same but for rounding, of tensors that of their largest entry."""
    if isinstance(one, (Tensor, int, float)) and isinstance(other, (Tensor, int, float)) and not isinstance(one, bool):
        left, right = (torch.as_tensor(value).detach() for value in (one, other))
        if left.shape != right.shape or left.is_complex() or right.is_complex():
            return left.shape == right.shape and bool(torch.allclose(left, right, rtol=tolerance))
        left, right = left.double(), right.double()
        finite = torch.cat([left.reshape(-1), right.reshape(-1)]).nan_to_num(0.0, 0.0, 0.0)
        scale = float(finite.abs().max()) if finite.numel() else 0.0
        return bool(torch.allclose(left, right, rtol=0.0, atol=tolerance * scale, equal_nan=True))
    if type(one) is not type(other):
        return False
    items, others = _items(one), _items(other)
    if items is not None and others is not None:
        return items.keys() == others.keys() and all(_close(items[key], others[key], tolerance) for key in items)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_close(a, b, tolerance) for a, b in zip(one, other, strict=True))
    return isinstance(one, _PLAIN) and bool(one == other)
