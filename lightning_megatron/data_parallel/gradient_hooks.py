"""Gradient hooks on parameters, run once per batch, on the whole gradient.

One process calls ``p.register_hook(clip)`` once in a backward, with the gradient of the batch. Here a backward runs per
micro-batch and per replica, and each gives a term: a hook that does anything but scale would compute something else. So
the user's hooks are taken off their parameters while backwards run, and called when the sums are there::

    begin      hooks off, earlier gradients aside      backward, backward, ...      finish    sum, hooks, earlier added

``register_post_accumulate_grad_hook`` likewise. With hooks, and where other code of the user's looks at gradients then,
they are summed after every batch of an accumulation, not after the last one only.

``zero_grad`` comes between a step's forward and its backward. Where backwards have run by then, and user code decides
what is cleared, or looks at what the update before has used, it finds those earlier gradients::

    begin      earlier aside      backward, ...      withdraw   earlier shown      zero_grad      finish    rest added
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_megatron.layers.whole.seen_kinds import user_hook


class GradientSink(Protocol):
    """Collects the gradients of a batch, and sums them over the ranks that share parameters."""

    @property
    def scatters(self) -> bool:
        """Whether each rank ends up with a shard of the sums, instead of ``.grad``."""

    def begin(
        self, *, fresh: bool | None, reduce: bool, divide_by: int = 1, scale: float = 1.0, once: bool = False
    ) -> None:
        """Prepare for the backward(s) of one batch; see ``GradientBuckets.begin``."""

    def withdraw(self) -> None:
        """Take the gradients out of sight, so that ``zero_grad`` between the step and its backward cannot wipe them."""

    def set_final(self, final: bool | frozenset[int]) -> None:
        """Say which gradients that arrive from now on are the last of this batch: all, none, or those of some ids."""

    def all_arrived(self) -> None:
        """Say that no gradient of this batch is to come, before anything else goes between the ranks."""

    def finish(self) -> None:
        """Wait for the sums and publish them."""


class _Hooked(NamedTuple):
    """A parameter and the user's hooks on it, by the numbers of their handles."""

    name: str
    parameter: nn.Parameter
    before: dict[int, Any]
    after: dict[int, Any]

    @classmethod
    def on(cls, name: str, parameter: nn.Parameter) -> _Hooked | None:
        """The user's hooks on a parameter, if there are any."""
        before, after = _user_hooks(parameter._backward_hooks), _user_hooks(_after(parameter))
        return cls(name, parameter, before, after) if before or after else None

    def as_given(self) -> _Hooked:
        """The same with the hooks as the user gave them, where they were wrapped."""
        before, after = ({n: user_hook(hook) for n, hook in hooks.items()} for hooks in (self.before, self.after))
        return self._replace(before=before, after=after)

    def places(self) -> list[tuple[Any, dict[int, Any]]]:
        """Places where torch looks for hooks, and the user's hooks among them."""
        return [(self.parameter._backward_hooks, self.before), (_after(self.parameter), self.after)]

    def take_off(self) -> None:
        """Take the hooks off their parameter."""
        for all_hooks, given in self.places():
            for number in given:
                del all_hooks[number]

    def put_back(self) -> None:
        """Put them back."""
        for all_hooks, given in self.places():
            if given:
                all_hooks.update(given)


class HookedGradients:
    """A sink that calls the user's gradient hooks itself.

    Args:
        sink: where gradients collect.
        parameters: by name, this rank's.
        seen: around the hooks; shows them gradients as one process has them.
        own: how many hooks of its own the sink has on each parameter.
        each: whether other code of the user's looks at ``.grad`` after each batch of an accumulation.
        keeps: whether gradients of the update before may be looked at after a step, or outlast its ``zero_grad``.

    Attributes:
        sink: as given.
    """

    def __init__(
        self,
        sink: GradientSink,
        parameters: Iterable[tuple[str, nn.Parameter]],
        seen: Callable[[], AbstractContextManager[None]],
        own: int,
        *,
        each: bool = False,
        keeps: bool = False,
    ) -> None:
        self.sink, self._parameters, self._seen, self._own = sink, list(parameters), seen, own
        self._each, self._keeps = each, keeps
        self._shows, self._shown = False, False  # after the step; and now
        self._hooked: list[_Hooked] = []
        self._earlier: list[tuple[nn.Parameter, Tensor]] = []
        self._without = -1  # hooks registered in this process when parameters were seen to have none of the user's

    @property
    def scatters(self) -> bool:
        """See :class:`GradientSink`."""
        return self.sink.scatters

    def begin(
        self, *, fresh: bool | None, reduce: bool, divide_by: int = 1, scale: float = 1.0, once: bool = False
    ) -> None:
        """Prepare for the backward(s) of one batch.

        Raises:
            RuntimeError: there are hooks, and no rank will have whole gradients.
        """
        self._put_back()
        left, self._earlier = self._earlier, []  # by a batch whose step returned nothing
        keeps = self._shows = bool(fresh) and self._keeps and not self.sink.scatters
        self._shown = False
        may_hook = keeps or (not fresh and (self._each or RemovableHandle.next_id != self._without))
        sums = left or [(p, p.grad.clone()) for _, p in self._parameters if p.grad is not None] if may_hook else []
        self.sink.begin(fresh=fresh, reduce=reduce, divide_by=divide_by, scale=scale, once=once)
        hooked = self._find_hooked()
        if not hooked and not keeps and not (self._each and (sums or not reduce)):
            return
        if hooked and self.sink.scatters:
            raise RuntimeError(
                f"`{hooked[0].name}` got a gradient hook after training had begun, when the optimizer's work was "
                "already shared out, so that no rank has its whole gradient. Register the hook in the constructor or "
                "in `on_fit_start`, or pass `MegatronStrategy(optimizer_sharding=False)`."
            )
        self._hooked = hooked
        for entry in hooked:
            entry.take_off()
        self._earlier = sums  # as they were: the sink has scaled its own, to be summed over the ranks again
        for parameter, _ in self._earlier:
            parameter.grad = None
        fresh = fresh if fresh is None else True
        self.sink.begin(fresh=fresh, reduce=True, divide_by=divide_by, scale=scale, once=once)

    def _find_hooked(self) -> list[_Hooked]:
        if RemovableHandle.next_id == self._without:  # no hook has been registered since
            return []
        own = self._own  # all of them are there now
        some = [
            (name, p)
            for name, p in self._parameters
            if p._backward_hooks or len(p._post_accumulate_grad_hooks or ()) > own  # type: ignore[attr-defined]
        ]
        self._without = -1 if some else RemovableHandle.next_id
        return [hooks for name, p in some if (hooks := _Hooked.on(name, p)) is not None]

    def withdraw(self) -> None:
        """Take the gradients out of sight; those of the update before are shown to ``zero_grad`` where it decides."""
        self.sink.withdraw()
        if self._shows:
            self._shown = True
            for parameter, gradient in self._earlier:
                parameter.grad = gradient

    def set_final(self, final: bool | frozenset[int]) -> None:
        """See :class:`GradientSink`."""
        self.sink.set_final(final)

    def all_arrived(self) -> None:
        """See :class:`GradientSink`."""
        self.sink.all_arrived()

    def finish(self) -> None:
        """Wait for the sums, call the hooks, and publish what they made of them."""
        if self._shown:
            self._shown = False
            self._earlier = [(p, p.grad) for _, p in self._parameters if p.grad is not None]
            for parameter, _ in self._earlier:
                parameter.grad = None
        self.sink.finish()
        hooked = [entry.as_given() for entry in self._put_back()]
        if not (hooked or self._earlier):
            return
        with self._seen() if hooked else nullcontext(), torch.no_grad():
            for _, parameter, before, _ in hooked:
                for hook in before.values():
                    if parameter.grad is not None:
                        _call(hook, parameter)
        earlier, self._earlier = self._earlier, []
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        with self._seen() if hooked else nullcontext():
            for _, parameter, _, after in hooked:
                for hook in after.values():
                    if parameter.grad is not None:
                        hook(parameter)

    def _put_back(self) -> list[_Hooked]:
        """Put the hooks back on their parameters; returns them."""
        hooked, self._hooked = self._hooked, []
        for entry in hooked:
            entry.put_back()
        return hooked

    @contextmanager
    def kept(self) -> Iterator[GradientSink]:
        """The sink, for gradients that are thrown away; after them, those of the update before are as they were."""
        keeps = self._keeps and not self.sink.scatters
        earlier = [(p, p.grad.clone()) for _, p in self._parameters if keeps and p.grad is not None]
        yield self.sink
        for parameter, gradient in earlier:
            parameter.grad = gradient

    def close(self) -> None:
        """Give hooks back after a step that failed."""
        self._put_back()


@contextmanager
def hooks_off(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[None]:
    """While inside, the user's gradient hooks are off some parameters, and none is called."""
    hooked = [hooks for name, parameter in parameters if (hooks := _Hooked.on(name, parameter)) is not None]
    for entry in hooked:
        entry.take_off()
    try:
        yield
    finally:
        for entry in hooked:
            entry.put_back()


def has_gradient_hooks(module: nn.Module) -> bool:
    """Whether the user has registered a gradient hook on a parameter."""
    return any(_Hooked.on(name, parameter) is not None for name, parameter in module.named_parameters())


def _after(parameter: Tensor) -> Any:
    return parameter._post_accumulate_grad_hooks


def _user_hooks(hooks: Any) -> dict[int, Any]:
    """Those that are not this package's own."""
    return {number: hook for number, hook in hooks.items() if user_hook(hook) is not None} if hooks else {}


def _call(hook: Callable[[Tensor], Any], parameter: nn.Parameter) -> None:
    gradient = parameter.grad
    changed = None if gradient is None else hook(gradient)
    if gradient is not None and changed is not None and changed is not gradient:
        if changed.shape != gradient.shape:
            raise RuntimeError(
                f"a gradient hook returned a tensor of shape {tuple(changed.shape)} for a gradient of shape "
                f"{tuple(gradient.shape)}; the shape must stay."
            )
        gradient.copy_(changed)
