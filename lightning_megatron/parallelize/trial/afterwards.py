"""Tries the code behind a row-parallel layer, which reads the sizes of one rank as the code before it does.

The attributes of a region and the width of its input are local while its module runs, and not up to the sum only::

    y = self.c_proj(y.view(batch, seq, width))     width / t, as it has to be
    return y / math.sqrt(self.n_embd)              n_embd / t, where one process divides by all of it

So the module is run to its end with the sizes of one rank and the product of the whole layer, and must return what the
unsplit module returns; so must those of its methods which a step may call in its place (``net.encode(x)``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_megatron.parallelize.reading.replay import Replay
from lightning_megatron.parallelize.trial.local_sizes import keep_returned
from lightning_megatron.parallelize.trial.training import NoDropout, has_numbers


class Afterwards:
    """Result of a module, and the products of one of its layers on the way there.

    Args:
        replay: of the module.
        row: name of the layer in it.
        tolerance: largest relative deviation that counts as equal.
        methods: names of methods, by the name of the part that has them, which return what is compared too.
    """

    def __init__(self, replay: Replay, row: str, tolerance: float, methods: Mapping[str, Iterable[str]]) -> None:
        self._replay, self._row, self._tolerance, self._methods = replay, row, tolerance, methods
        self._whole = {training: self._recorded(training) for training in (False, True)}

    def objection(self, localise: Callable[[nn.Module], Any], args: Any, kwargs: Any) -> str:
        """The reason why the module returns something else with the sizes of one rank; empty if it does not.

        Args:
            localise: gives a copy the slices and sizes of the rank.
            args: positional arguments of the rank.
            kwargs: keyword arguments of the rank.
        """
        for training, whole in self._whole.items():
            if whole is None:
                continue
            products, expected = whole
            given, kept = iter(products), list[Any]()

            def prepare(copied: nn.Module, given: Iterator[Tensor] = given, kept: list[Any] = kept) -> None:
                localise(copied)
                self._keep(copied, kept)
                copied.get_submodule(self._row).forward = lambda *_, **__: next(given).clone()

            try:
                with torch.no_grad(), NoDropout():
                    returned = self._replay.run(prepare, args=args, kwargs=kwargs, training=training)[1]
            except Exception as error:  # the user's code, with sizes that it may not fit
                return f"behind {self._row!r}, {type(error).__name__}: {error}".splitlines()[0]
            found = tree_leaves((returned, kept))
            if len(found) == len(expected) and all(map(self._alike, found, expected)):
                continue
            return f"code behind {self._row!r} reads a size that is another on each rank"
        return ""

    def _alike(self, found: Any, expected: Any) -> bool:
        """Whether two returned values are equal; those of a rank's own heads, which have another shape, may differ."""
        if isinstance(expected, (int, float)) and isinstance(found, (int, float)):
            return found == expected or abs(found - expected) <= self._tolerance * abs(expected)
        if not (isinstance(expected, Tensor) and isinstance(found, Tensor)):
            return True
        if found.shape != expected.shape or not expected.numel() or not has_numbers(expected):
            return True
        difference = (found - expected).abs() if expected.is_floating_point() else found != expected
        scale = float(expected.abs().max()) if expected.is_floating_point() else 0.0
        return float(difference.max()) <= 10 * self._tolerance * max(scale, 1e-30)

    def _recorded(self, training: bool) -> tuple[list[Tensor], list[Any]] | None:
        """Products of the layer and what the module returns; ``None`` if it returns something else the next time."""
        first, second = self._run(training), self._run(training)
        if first is None or second is None or len(first[1]) != len(second[1]):
            return None
        return first if all(map(self._alike, second[1], first[1])) else None

    def _run(self, training: bool) -> tuple[list[Tensor], list[Any]] | None:
        products: list[Tensor] = []
        kept: list[Any] = []

        def watch(copied: nn.Module) -> None:
            self._keep(copied, kept)
            copied.get_submodule(self._row).register_forward_hook(
                lambda layer, inputs, output: products.append(output.detach().clone())
            )

        try:
            with torch.no_grad(), NoDropout():
                returned = self._replay.run(watch, training=training)[1]
        except Exception:  # code that cannot run so here: it is not compared
            return None
        return products, [
            value.detach() if isinstance(value, Tensor) else value for value in tree_leaves((returned, kept))
        ]

    def _keep(self, copied: nn.Module, kept: list[Any]) -> None:
        for owner, methods in self._methods.items():
            keep_returned(copied.get_submodule(owner), methods, kept)
