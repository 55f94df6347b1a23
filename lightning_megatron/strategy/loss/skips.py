"""Steps that return ``None`` for some batches, which are to be left out, as Lightning does on one device.

Whether a batch is left out is often for its loss to say (``if not torch.isfinite(loss): return None``), and only the
stage that computes the loss has it. A batch of such a step therefore runs whole, all forwards before all backwards, and
that stage tells the others in between::

    stage 0     F0 ──────── go on? ◀─┐       B0
    stage 1         F0 ── the answer ┘ B0        or nothing, on every stage

That a step may return ``None`` is read in its source.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_megatron.mesh.parts.bytecode import names_in
from lightning_megatron.mesh.parts.packages import FRAMEWORKS, comes_from
from lightning_megatron.mesh.parts.syntax import definition_of
from lightning_megatron.pipeline.cut.flows import returns


class Asks:
    """Whether a step goes on to its backward; see :attr:`~lightning_megatron.pipeline.run.pipeline_step.PipelineStep`.

    Args:
        share: gives a scalar of the stage that computes the loss to all stages.
        device: where tensors live.
    """

    def __init__(self, share: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self._share, self._device = share, device
        self._skips = False

    def hears(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The user's step; what it returns is noted."""

        def heard(batch: Any) -> Any:
            output = call(batch)
            self._skips = output is None
            return output

        return heard

    def __call__(self) -> bool:
        return not float(self._share(torch.tensor(float(self._skips), dtype=torch.float64, device=self._device)))


class Skips:
    """Facts about a module's steps that may leave batches out.

    Args:
        module: the user's.
        alone: whether there is one replica; Lightning refuses to skip with several.

    Attributes:
        may: whether ``training_step`` may return ``None``, by its source.
        whole: what of the step is decided by the whole batch, in words; or "".
    """

    def __init__(self, module: pl.LightningModule, *, alone: bool) -> None:
        self.may = alone and module.automatic_optimization and may_return_none(module, module.training_step)
        self.whole = "`training_step` may return None, which leaves a batch out" if self.may else ""
        if not self.whole and "should_stop" in _names(module, module.training_step):
            self.whole = (
                "`training_step` sets `trainer.should_stop`, which the loss of a part of a batch may not decide"
            )
        self._said = False

    def asks(self, share: Callable[[Tensor], Tensor], device: torch.device) -> Asks:
        """For one step."""
        return Asks(share, device)

    def say(self, parts: int, stages: int) -> None:
        """One line about what this costs, once."""
        if self._said:
            return
        self._said = True
        idle = f", in which each of the {stages} stages is busy a {stages}th of the time" if stages > 1 else ""
        rank_zero_info(
            f"{self.whole}. So that the step is that of one process, each batch runs whole{idle}, with the activations "
            f"of all {parts} micro-batches. "
            + (
                "Without `return None` it runs in micro-batches; `MegatronStrategy(nonfinite='skip')` skips updates "
                "whose loss or gradients are not finite."
                if self.may
                else "Set it in `on_train_batch_end`, and it runs in micro-batches."
            )
        )


def _names(owner: Any, method: Callable[..., Any]) -> set[str]:
    """Names in the code of a method, and of methods of ``owner`` that it names."""
    waiting, seen, found = [method], set[Any](), set[str]()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        names = set(names_in(code))
        found |= names
        following = (inspect.getattr_static(type(owner), name, None) for name in names)
        waiting += [each for each in following if inspect.isfunction(each) and not comes_from(each, *FRAMEWORKS)]
    return found


def may_return_none(owner: Any, method: Callable[..., Any]) -> bool:
    """Whether a method, or one of ``owner`` that it returns the result of, says ``return None``, or may end without a
    ``return``. What has no source does not.
    """
    waiting, seen = [method], set()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        function = getattr(function, "__func__", function)
        if function in seen:
            continue
        seen.add(function)
        definition = definition_of(function)
        if not isinstance(definition, ast.FunctionDef):
            continue
        if not returns(definition.body):
            return True
        for value in _returned(definition.body):
            if value is None or (isinstance(value, ast.Constant) and value.value is None):
                return True
            name = _own_method(value)
            following = inspect.getattr_static(type(owner), name, None) if name else None
            if inspect.isfunction(following):
                waiting.append(following)
    return False


def _own_method(value: ast.expr) -> str:
    """``name`` in ``self.name(...)``; "" for any other expression."""
    function = value.func if isinstance(value, ast.Call) else None
    mine = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self"
    return function.attr if mine and isinstance(function, ast.Attribute) else ""


def _returned(body: Sequence[ast.stmt]) -> Iterator[ast.expr | None]:
    """Values of the ``return`` statements of a function, without those of functions inside of it."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if isinstance(statement, ast.Return):
            value = statement.value
            yield from (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)
        for field in ("body", "orelse", "finalbody"):
            yield from _returned(getattr(statement, field, ()))
        for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            yield from _returned(part.body)
