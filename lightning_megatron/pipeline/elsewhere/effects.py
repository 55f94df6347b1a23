"""Side effects of a layer, besides its output, made known to the stages that skip it.

In one process the step may read what its layers kept: a balancing loss on each of them, a list that they append to,
the size of their activations in a dictionary. A stage that skips a layer has none of it. So the stage that computes a
layer compares, before and after the call, what the layer's code can write to (:mod:`.reachable`); what has changed is
an :class:`Effect`, travels with the boundary, and is repeated where the layer is skipped, at the same place in the
program::

    stage 0   layer 1 runs: self.aux = t          ──(module net.layers.1, set aux, t)──▶
    stage 1   layer 1 is skipped: .aux = t', whose gradient goes back to stage 0 with the boundary's

Small tensors that it returned besides the hidden state are values like these, and so is what it logs. How they travel
says :mod:`.luggage`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_megatron.pipeline.elsewhere.away import NUMBERS
from lightning_megatron.pipeline.elsewhere.containers import MISSING, Address, Container, NoSuchHook, resolve
from lightning_megatron.pipeline.elsewhere.undo import SUM, Change

LARGEST = 4096
"""Elements of the largest tensor that travels besides the activations."""


@dataclass(frozen=True)
class Effect:
    """One change that a layer's call made.

    Attributes:
        layer: the layer's place in the trunk.
        address: of the container.
        kind: ``"set"`` of the entry ``key`` or ``"drop"`` of it, ``"append"`` of ``value``'s entries to a list,
            ``"fill"`` of a list, ``"return"`` of ``value`` as leaf ``key`` of the output, or ``"log"`` with the
            arguments ``value``.
        key: of the entry; ``None`` for lists.
        value: the new value, or while it travels its description.
        before: the number, or small tensor without a gradient, that was there before; ``None`` for all others.
        is_reset: whether the step has written there after the layer.
    """

    layer: int
    address: Address
    kind: str
    key: Any
    value: Any
    before: Any = None
    is_reset: bool = False

    @classmethod
    def of(cls, layer: int, change: Change) -> Effect:
        """A change as it is sent to other stages.

        Args:
            layer: the place in the trunk of the layer that made it.
            change: on this stage.
        """
        return cls(layer, change.container.address, change.kind, change.key, change.new, _number(change.old))

    @property
    def entry(self) -> tuple[Address, Any]:
        """The changed entry of a container."""
        return self.address, self.key

    def repeat(self, root: nn.Module, arguments: tuple[Any, ...]) -> Change | None:
        """Make the change here.

        Args:
            root: the user's module.
            arguments: what the layer is called with.

        Returns:
            How to take it back; ``None`` where it belongs to a hook that only the layer's own stage has.

        Raises:
            RuntimeError: there is nothing at the address.
        """
        try:
            container = Container(self.address, resolve(root, self.address, arguments))
            old = MISSING if self.kind == "append" else container.read(self.key)
            change = Change(container, self.kind, self.key, old, self.value)
            container.change(self.kind, self.key, self.value)
            return change
        except NoSuchHook:
            return None
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise RuntimeError(
                f"layer {self.layer} of the trunk wrote to {self.place()}, which is not there on this pipeline stage "
                f"({type(error).__name__}: {error}). Create it on every rank before the layers run, for instance in "
                "the constructor, or use `pipeline_parallel_size=1`."
            ) from error

    def repeat_later(self, root: nn.Module) -> None:
        """Make the change here after the step, unless the step has taken away what was written to: a hook that it
        removed, a list that it made for itself.

        Args:
            root: the user's module.
        """
        try:
            resolve(root, self.address)
        except (AttributeError, LookupError, TypeError, ValueError):
            return
        self.repeat(root, ())

    def place(self) -> str:
        """Location of the write, in words."""
        words = "".join(_words(step) for step in self.address).lstrip(".")
        return f"`{words}`" if self.key is None else f"`{words}`, entry {self.key!r},"


def _words(step: tuple[Any, ...]) -> str:
    kind, *at = step
    if kind in ("module", "attr"):
        return f".{at[0]}" if at[0] else "self"
    if kind == "item":
        return f"[{at[0]!r}]"
    if kind in ("global", "globals"):
        return ".".join(map(str, at))
    return {"hook": " in a hook", "cell": " in a closure", "argument": "an argument"}.get(kind, "")


def lasts(effects: Iterable[Effect] | None) -> bool:
    """Whether layers have changed anything that outlasts the micro-batch, besides parts of their outputs."""
    return any(effect.kind != "return" for effect in effects or ())


def returned_beside(layer: int, output: Any) -> Iterator[Effect]:
    """Small tensors and numbers that a layer returned besides its first tensor, such as a balancing loss, for code on
    later stages that collects them.

    Args:
        layer: the layer's place in the trunk.
        output: what it returned.
    """
    for place, leaf in enumerate(pytree.tree_leaves(output)):
        if (place and isinstance(leaf, Tensor) and leaf.numel() <= LARGEST) or type(leaf) in NUMBERS:
            yield Effect(layer, (), "return", place, leaf)


def _number(value: Any) -> Any:
    """``value`` if it is a number, or a small tensor of them; else ``None``."""
    if type(value) is Tensor:
        return value if not value.requires_grad and value.numel() <= SUM else None
    return value if isinstance(value, (int, float)) else None
