"""Overlaps the all-gather of updated weights with the next forward: a module waits for a bucket just before it runs.

::

    update │ all-gather: bucket 2 ─ bucket 1 ─ bucket 0
           │ loader, embedding ─ wait 2 ─ layer 0 ─ wait 1 ─ layer 1 ─ ...

A forward pre-hook of each module waits for the module's own parameters. Code that uses a parameter without calling its
module (``F.linear(x, self.embed.weight)``) would read stale weights. The first step of a run is therefore observed: the
buckets of parameters used in this way are waited for before every later step. If a later step uses another parameter
in this way, an error is raised when its gradient arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megatron.data_parallel.buckets.bucket import Bucket
from lightning_megatron.data_parallel.buckets.buckets import GradientBuckets

_VIEWS = ("data", "T", "mT", "H", "mH", "real", "imag")
_SIZES = (
    "numel",
    "nelement",
    "size",
    "dim",
    "ndimension",
    "__len__",
    "element_size",
    "is_floating_point",
    "is_complex",
)


class LateGather:
    """Starts the all-gathers of updated weights, and waits for each as late as possible.

    Args:
        module: its submodules get forward pre-hooks that wait for their own parameters.
        buckets: hold the weights to gather.
    """

    def __init__(self, module: nn.Module, buckets: GradientBuckets) -> None:
        self._buckets = buckets
        self._pending: dict[int, Bucket] = {}
        self._early: dict[int, Bucket] = {}
        self._called: set[int] = set()
        self._saw_a_step = False
        self._owners: dict[int, list[int]] = {}
        self._hooks: list[Any] = []
        for child in module.modules():
            own = list(child.parameters(recurse=False))
            for parameter in own:
                self._owners.setdefault(id(parameter), []).append(id(child))
            if own:
                self._hooks.append(child.register_forward_pre_hook(_Wait(self, own)))
        buckets.on_arrival = self.check

    def close(self) -> None:
        """Wait for all gathers and remove the hooks."""
        self.finish()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._buckets.on_arrival = None

    def start(self, buckets: Sequence[Bucket]) -> None:
        """Start all-gathers of updated weights, last bucket first: the order in which the forward needs them."""
        for bucket in reversed(buckets):
            bucket.start_gather()
            self._pending[id(bucket)] = bucket

    def finish(self) -> None:
        """Wait for all gathers under way."""
        while self._pending:
            self._pending.popitem()[1].finish_gather()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a training step; the first one is observed for parameters used without calling their module."""
        self._called.clear()
        for bucket in self._early.values():
            self._wait(bucket)
        if self._saw_a_step:
            yield
            return
        with ReportedUses(self.used):
            yield
        self._saw_a_step = True

    def called(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """Note that a module is about to run, and wait for its own parameters."""
        self._called.add(id(module))
        if self._pending:
            for parameter in parameters:
                place = self._buckets.place_of(parameter)
                if place is not None:
                    self._wait(place[0])

    def used(self, parameter: Tensor) -> None:
        """Note a use in the observed step.

        If none of the modules that hold the parameter has been called yet, its bucket is waited for before every step.
        """
        owners = self._owners.get(id(parameter))
        if owners is None or any(owner in self._called for owner in owners):
            return
        place = self._buckets.place_of(parameter)  # type: ignore[arg-type]
        if place is not None:
            self._early[id(place[0])] = place[0]

    def check(self, bucket: Bucket, index: int) -> None:
        """Refuse the gradient of a parameter that was used without a wait for its bucket.

        Args:
            bucket: of the parameter whose gradient has arrived.
            index: of the parameter in the bucket.

        Raises:
            RuntimeError: no module that holds it was called, and it was not used so in the first step.
        """
        if id(bucket) in self._early or not self._saw_a_step:
            return
        owners = self._owners.get(id(bucket.parameters[index]), [])
        if not any(owner in self._called for owner in owners):
            raise RuntimeError(
                f"`{bucket.names[index]}` was used without calling the module that holds it, in a step that was not "
                "the first, while its new values may have been under way; pass `overlap_parameter_gather=False`."
            )

    def _wait(self, bucket: Bucket) -> None:
        if self._pending.pop(id(bucket), None) is not None:
            bucket.finish_gather()


class _Wait:
    """Forward pre-hook of a module with parameters of its own: waits for their buckets."""

    def __init__(self, owner: LateGather, parameters: list[nn.Parameter]) -> None:
        self._owner, self._parameters = owner, parameters

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        self._owner.called(module, self._parameters)


class ReportedUses(TorchFunctionMode):
    """Reports every torch function called with a parameter among its arguments.

    Args:
        used: called with the parameter, before the function.
    """

    def __init__(self, used: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self._used = used

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()) if reads_values(func) else ():
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if type(each) is not Tensor and isinstance(each, nn.Parameter):  # the second by itself is slow
                    self._used(each)
        return func(*args, **kwargs)


def reads_values(func: Any) -> bool:
    """Whether a call may read or replace values: false if it asks for a size, or an attribute such as ``grad``."""
    name = getattr(func, "__name__", "")
    if name in _SIZES:
        return False
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") in _VIEWS
    return True
