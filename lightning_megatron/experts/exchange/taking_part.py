"""Tells with every exchange of rows which mixture each of the ranks that share out experts calls.

Each exchange begins with a message of counts, which also says what its sender is at::

    2 + n    calls mixture n
    -2 - n   computes gradients through mixture n inside of its step
    PAUSED   is through with a part of its step, such as a loop that generates tokens, and waits for the others
    DONE     is through with its step

Replicas may call their model a different number of times in evaluation, as their texts end after different numbers of
tokens. One that is through goes on computing its experts for the others, without rows of its own, until all are::

    replica 0   calls 0 1 2 3   calls 0 1 2 3   DONE          DONE          all are: the step ends
                                                computes 0..3
    replica 1   calls 0 1 2 3   calls 0 1 2 3   calls 0 1 2 3 DONE

Ranks that call different mixtures at once would compute each other's rows with the wrong experts. That is refused, on
all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.joint_backwards import JointBackwards
from lightning_megatron.mesh.messages.passed_on import raw_all_to_all
from lightning_megatron.mesh.replaced import Replacements
from lightning_megatron.mesh.torch_functions import lines_of_step

DONE, PAUSED, CALLING = range(3)


@dataclass(frozen=True)
class Told:
    """Notes of the ranks of a group to this one before an exchange.

    Attributes:
        rows: how many rows each rank sends for each expert here, [ranks, experts here].
        of_experts: how many rows there are for each expert here.
        called: whether a rank has called an expert here, rows or not.
        incoming: how many rows each rank sends.
        outgoing: how many rows go to each rank.
        tokens: how many tokens each rank has, where all ranks get all of them.
    """

    rows: Tensor
    of_experts: list[int]
    called: list[bool]
    incoming: list[int]
    outgoing: list[int]
    tokens: list[int]


class Answers(Protocol):
    """A mixture that was called here."""

    def answer(self, told: Told) -> None:
        """Take part in a call of the others without rows."""


class Calls:
    """The calls of all mixtures that share their experts out over one group.

    Copies of a module share it, as it holds the group.

    Args:
        group: the ranks that share out the experts.

    Attributes:
        group: the same.
        joint: told the messages that have backwards.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.joint = group, JointBackwards(group)
        self._names: list[str] = []
        self._copies: list[int] = []
        self._answers: WeakValueDictionary[int, Answers] = WeakValueDictionary()
        self._widest = 0

    def __deepcopy__(self, memo: Any) -> Calls:
        return self

    def add(self, name: str, local: int) -> int:
        """The number of a further mixture called ``name``, of which each rank holds ``local`` experts."""
        self._names.append(name)
        self._copies.append(0)
        self._widest = max(self._widest, local)
        return len(self._names) - 1

    def add_copy(self, number: int) -> int:
        """The number of a copy of mixture ``number``, whose experts may have other values; when it is first called."""
        own = number % len(self._names)
        self._copies[own] += 1
        return own + self._copies[own] * len(self._names)

    def call(self, number: int, rows: Tensor, called: Tensor, mixture: Answers, tokens: int = 0) -> Told:
        """Tell the others of a call, and hear of theirs; collective over the group.

        Args:
            number: of the mixture.
            rows: how many rows go to each rank's experts, [ranks, experts of a rank].
            called: whether experts are called at all, likewise.
            mixture: takes part in such a call without one of this rank's own.
            tokens: how many this rank has.

        Raises:
            RuntimeError: not all ranks are at the same call; on each of them.
        """
        self._answers[number] = mixture
        return self._told(*self._tell(CALLING + number, rows.device, rows, called, tokens), rows.shape[1])

    def differentiate(self, number: int, device: torch.device) -> None:
        """Called in the backward of a call's messages. That of a step is the same on all ranks; one inside of a forward
        is told to the others, collective over the group.

        Args:
            number: of the mixture.
            device: where the ranks' tensors live.

        Raises:
            RuntimeError: not all ranks are at the same; on each of them.
        """
        if self.joint.in_forward:
            nothing = torch.zeros(self.group.size(), self._widest, dtype=torch.long, device=device)
            self._tell(-CALLING - number, device, nothing, nothing)

    def end(self, device: torch.device, *, paused: bool = False) -> None:
        """Compute experts for the others until they are through too; collective over the group.

        Args:
            device: where the ranks' tensors live.
            paused: whether only with a part of a step; then those who have ended theirs stay.

        Raises:
            RuntimeError: the others' calls need gradients, or a mixture that has not been called here before.
        """
        while self._names:
            nothing = torch.zeros(self.group.size(), self._widest, dtype=torch.long, device=device)
            arrived, heard = self._tell(PAUSED if paused else DONE, device, nothing, nothing)
            states = [row[-2] for row in heard[:-1]]
            number = max(states) - CALLING
            if number < 0:
                if paused or not any(states):
                    return
                continue
            if number not in self._answers:
                raise RuntimeError(f"another replica calls `{self._name(number)}`, which this one has never called.")
            with torch.no_grad():
                self._answers[number].answer(self._told(arrived, heard, self._widest))

    def _told(self, arrived: Tensor, heard: list[list[int]], local: int) -> Told:
        """The ranks' notes to one that holds ``local`` experts of the mixture that is called."""
        said = heard[:-1]
        of_experts = [sum(row[expert] for row in said) for expert in range(local)]
        called = [any(row[self._widest + expert] for row in said) for expert in range(local)]
        incoming, tokens = [sum(row[: self._widest]) for row in said], [row[-3] for row in said]
        return Told(arrived[:, :local], of_experts, called, incoming, heard[-1], tokens)

    def _tell(
        self, state: int, device: torch.device, rows: Tensor, called: Tensor, tokens: int = 0
    ) -> tuple[Tensor, list[list[int]]]:
        """Each rank's note to this one, on the device and here; the last of the latter is what goes to each rank.

        It is the only time that the host waits for the device: sizes of messages have to be known there.
        """
        told = torch.zeros(self.group.size(), 2 * self._widest + 3, dtype=torch.long, device=device)
        told[:, : rows.shape[1]] = rows
        told[:, self._widest : self._widest + called.shape[1]] = called
        told[:, -3], told[:, -2], told[:, -1] = tokens, state, int(torch.is_grad_enabled())
        arrived = raw_all_to_all(told, self.group)
        flat = torch.cat((arrived.flatten(), rows.sum(1))).tolist()
        width, size = told.shape[1], self.group.size()
        heard = [flat[rank * width : (rank + 1) * width] for rank in range(size)]
        self._check([row[-2] for row in heard], {row[-1] for row in heard if row[-2] >= CALLING})
        return arrived, [*heard, flat[size * width :]]

    def _check(self, states: list[int], with_gradients: set[int]) -> None:
        unlike = self._unlike(states, with_gradients)
        if unlike:
            at = dict.fromkeys(objects.gather(lines_of_step() or "the end of the step", self.group))
            raise RuntimeError(f"{unlike} They are at {', and at '.join(at)}.")

    def _unlike(self, states: list[int], with_gradients: set[int]) -> str:
        """Why ranks cannot go on together; "" if they can."""
        calling = {state for state in states if state >= CALLING}
        behind = {-state for state in states if state < 0}
        if behind and len(set(states)) > 1:
            return (
                f"a replica computes a gradient through `{self._name(max(behind) - CALLING)}` in its step, and another "
                "one does not. All replicas that share out experts take part in every gradient, so they must ask for "
                "the same ones (`torch.autograd.grad`) in the same order, or use `expert_parallel_size=1`."
            )
        if len(calling) > 1:
            told = " and ".join(f"`{self._name(state - CALLING)}`" for state in sorted(calling))
            return (
                f"replicas that share out experts call {told} at once. All of them take part in every layer, so they "
                "must call the same ones in the same order: let no layer depend on a replica's own data or draws, or "
                "use `expert_parallel_size=1`."
            )
        if len(with_gradients) > 1:
            return (
                f"a replica calls `{self._name(calling.pop() - CALLING)}` with gradients, and another one under "
                "`torch.no_grad()`. All replicas that share out experts take part in every backward: let this not "
                "depend on a replica's own data or draws, or use `expert_parallel_size=1`."
            )
        if calling and any(with_gradients) and len(set(states)) > 1:
            return (
                f"a replica calls `{self._name(calling.pop() - CALLING)}` with gradients, and another one has ended "
                "its step. All replicas that share out experts take part in every layer, so they must call them equally"
                " often: let no layer depend on a replica's own data or draws, or use `expert_parallel_size=1`."
            )
        return ""

    def _name(self, number: int) -> str:
        return self._names[number % len(self._names)]


class StepCalls:
    """Lets replicas whose steps call their model a different number of times wait for each other.

    Args:
        module: the user's.
        calls: of its experts; ``None`` where none are shared out.
        device: where its tensors live.
        in_step: whether a step is running.
    """

    def __init__(
        self, module: nn.Module, calls: Calls | None, device: torch.device, in_step: Callable[[], bool]
    ) -> None:
        self._calls, self._device, self._in_step, self._replaced = calls, device, in_step, Replacements()
        for model in module.modules() if calls is not None else ():
            if callable(getattr(model, "generate", None)) and hasattr(model, "generation_config"):
                self._replaced.call(model, "generate", self._waits(cast(Any, model).generate))

    def _waits(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def generate(*args: Any, **kwargs: Any) -> Any:
            found = own(*args, **kwargs)
            if self._calls is not None:
                with torch.no_grad():
                    self._calls.end(self._device, paused=self._in_step())
            return found

        return generate

    def end(self) -> None:
        """Called when a replica's step has ended; collective over the ranks that share out experts."""
        if self._calls is not None:
            self._calls.end(self._device)

    def ending(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A step that ends in all replicas, as :meth:`end` has it."""

        def ends(batch: Any) -> Any:
            output = call(batch)
            self.end()
            return output

        return call if self._calls is None else ends

    def joining(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A step that ends in all replicas, and whose loss has a backward as that of others, in the same messages."""

        def joins(batch: Any) -> Any:
            joint = cast(Calls, self._calls).joint
            with joint.noting() as noted:
                output = call(batch)
            self.end()
            return joint.joined(output, noted)

        return call if self._calls is None else joins

    def close(self) -> None:
        """Give the models' methods back."""
        self._replaced.take_back()
