"""State of the layers at the end of a step, after the last line of the user's code.

Layers leave things behind, and the step's own code, on the stage that reaches it, reads them and may reset them. What
is there afterwards is what one process has after the step, so all stages are told::

    last stage     layer 1 is skipped: .aux = t    loss += layer.aux; layer.aux = 0.0   ──(set aux, 0.0)──▶ all stages

Between two micro-batches nobody can be told in time. A layer that goes on from a number which the step resets is
refused, therefore; it is seen by the number from which the layer's stage went on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.pipeline.elsewhere.away import source_of
from lightning_megatron.pipeline.elsewhere.containers import MISSING, Address, Container, resolve
from lightning_megatron.pipeline.elsewhere.effects import Effect
from lightning_megatron.pipeline.elsewhere.reachable import may_read
from lightning_megatron.pipeline.elsewhere.undo import Change

TRIAL = "training_step (tried)"  # as :func:`tried` has it
"""Name of a step whose writes are put back on every stage after each micro-batch: nothing is left in the end."""

TRIAL_WITH_BACKWARD = "training_step (tried, with backwards)"
"""Name of one of which backwards run as well."""


def trains(where: str) -> bool:
    """Whether a step, or a pass, of this name is one of training."""
    return where.startswith("training_step") and where != TRIAL


def tried(name: str) -> str:
    """Name of a trial of the step of this name, of which nothing is left in the end."""
    return f"{name} (tried)"


_Entry = tuple[Address, Any]
_NOWHERE = object()


class FinalState:
    """Follows, on each rank, the side effects of the layers in one step.

    Args:
        root: the user's module.
        names: of the layers.
    """

    def __init__(self, root: nn.Module, names: Sequence[str]) -> None:
        self._root, self._names = root, names
        self._effects: list[Effect] = []
        self._reset: dict[_Entry, Any] = {}
        self._taken_back: set[_Entry] = set()
        self._first, self._tried = True, False

    def begin(self, micro_batch: int, where: str) -> None:
        """Prepare for a run of this micro-batch in the step of this name."""
        self._first, self._tried = micro_batch == 0, where.endswith((tried(""), TRIAL_WITH_BACKWARD))

    def note(self, effects: Iterable[Effect]) -> None:
        """On the stage where the step has just ended for a micro-batch, keep the side effects of all layers."""
        for effect in effects:
            if self._tried or _is_told_otherwise(effect):
                continue
            self._effects.append(effect)
            if effect.kind == "set" and effect.before is not None:
                now = self._now(effect)
                if now is not effect.value and now is not _NOWHERE:
                    self._reset[effect.entry] = now

    def set_back(self, effects: Iterable[Effect]) -> dict[tuple[str, Any], Any]:
        """Values that the step has set after the layers which set them too, before they are put back; at its end.

        Args:
            effects: of all layers.

        Returns:
            (place, key) of an attribute, or of an entry in one -> what is there now.
        """
        found = {}
        for effect in (effect for effect in effects if not _is_told_otherwise(effect)):
            (kind, *at), *inside = effect.address
            if effect.kind == "set" and kind == "module" and all(way == "attr" for way, *_ in inside):
                now = self._now(effect)
                if now is not effect.value and now is not _NOWHERE and source_of(now) is None:
                    place = ".".join((*at, *(name for _, name in inside))).lstrip(".")
                    found[place, effect.key] = now
        return found

    def note_taken_back(self, change: Change) -> None:
        """Say that something was put back here as it was before a run."""
        self._taken_back.add((change.container.address, change.key))

    def check(self, effect: Effect, unit: nn.Module | None) -> None:
        """Refuse a layer that continues from a number which the step has reset since the previous micro-batch.

        Args:
            effect: of the layer.
            unit: the layer.

        Raises:
            RuntimeError: naming the number and the way out.
        """
        if self._first or effect.entry not in self._reset or unit is None:
            return
        in_table = isinstance(resolve(self._root, effect.address), (dict, list))
        if not _equal(self._reset[effect.entry], effect.before) and may_read(unit, effect.key, in_table):
            raise RuntimeError(
                f"layer `{self._names[effect.layer]}` goes on from the value of {effect.place()} in each micro-batch, "
                "and the step sets it to another one after the layers, where the pipeline stage of this layer does "
                "not come. Let the layer set the value instead of adding to it, reset it in `on_train_batch_start` "
                "or before the layers are called, or use `pipeline_parallel_size=1`."
            )

    def take(self) -> list[Effect]:
        """The effects of the step that has ended, for the other stages."""
        found, self._effects, self._reset = self._effects, [], {}
        self.forget()
        latest = {effect.entry: effect for effect in found if effect.kind not in ("append", "fill")}
        told = [self._present(effect) for effect in latest.values()]
        lists: dict[Address, list[Effect]] = {}
        for effect in found:
            if effect.kind in ("append", "fill"):
                lists.setdefault(effect.address, []).append(effect)
        told += [self._grown(effects) for effects in lists.values()]
        return [effect for effect in told if effect is not None]

    def is_due(self, effect: Effect) -> bool:
        """Whether the stage of the layer itself needs the effect."""
        return effect.is_reset or effect.entry in self._taken_back

    def forget(self) -> None:
        """Finish a step."""
        self._taken_back = set()

    def _now(self, effect: Effect) -> Any:
        """The present value; ``_NOWHERE`` if the step has taken away what was written to, as it does with a hook."""
        try:
            return Container(effect.address, resolve(self._root, effect.address)).read(effect.key)
        except (AttributeError, LookupError, TypeError, ValueError):
            return _NOWHERE

    def _present(self, effect: Effect) -> Effect | None:
        now = self._now(effect)
        if now is _NOWHERE:
            return None
        if now is effect.value:
            return effect
        if now is MISSING:
            return replace(effect, kind="drop", value=None, is_reset=True)
        return replace(effect, value=now, is_reset=True)

    def _grown(self, effects: list[Effect]) -> Effect | None:
        """The entries that a list has grown by, where they are still at its end; otherwise all of its entries."""
        now = self._now(effects[0])
        if not isinstance(now, list):
            return None
        added = [entry for effect in effects for entry in effect.value]
        only_grew = all(effect.kind == "append" for effect in effects) and 0 < len(added) <= len(now)
        if only_grew and all(old is new for old, new in zip(now[-len(added) :], added, strict=True)):
            return replace(effects[0], value=added)
        return replace(effects[0], kind="fill", value=now)


def _is_told_otherwise(effect: Effect) -> bool:
    """Whether it is gone after the step, or an attribute of the LightningModule, which is followed as a whole."""
    if effect.kind in ("return", "log") or ("context",) in effect.address:
        return True
    kind, *at = effect.address[0]
    return kind == "argument" or (kind == "module" and not at[0])


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(torch.equal(one.to(other), other))
    return not isinstance(one, Tensor) and not isinstance(other, Tensor) and bool(one == other)
