"""Split parameters and their gradients, seen whole by code that runs between steps.

A user's hook takes norms of rows, initialises matrices anew, copies weights into a teacher. While it runs, every split
parameter of this rank, and its gradient, becomes whole when it is touched. The Python object stays, so that optimizers
and dictionaries keyed by parameter go on working; its class and its ``data`` change::

    seen ──touched: gathered──▶ an ordinary whole tensor ──the hook returns: cut──▶ nn.Parameter, its part
      └──every element changed alike──▶ the part is changed, nothing travels

The memory of the part stays where gradient buckets and optimizers expect it. What a hook keeps of a gathered tensor
beyond its return would go stale, and is refused.

Gathering is a collective over the tensor group. In a hook that may run other code on other ranks (``if
trainer.is_global_zero``) every gathering is announced, and ranks that are done answer until all are.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_megatron.layers.whole import seen_kinds as kinds
from lightning_megatron.layers.whole.gathered_views import is_kept
from lightning_megatron.layers.whole.parameter_parts import ParameterParts
from lightning_megatron.layers.whole.rounds import NOTHING, Rounds, refuse_other_threads
from lightning_megatron.mesh.messages.objects import device_of


class SeenBetween:
    """A tensor that may be seen whole.

    Attributes:
        parts: how the parameter is split.
        number: tells it from all others of the group, alike on all ranks.
        tensor: a weak reference to the object that user code holds.
        kind: its class outside of hooks.
        part: its data while it is gathered, otherwise ``None``.
        memory: address of the gathered storage.
        before: checksum of the gathered values, where ranks compare what they changed.
        writes: changes of the part.
    """

    def __init__(self, parts: ParameterParts, number: int, tensor: Tensor) -> None:
        self.parts, self.number, self.tensor, self.kind = parts, number, weakref.ref(tensor), type(tensor)
        self.part: Tensor | None = None
        self.memory: int | None = None
        self.before = self.writes = 0.0


class NotAlike(Exception):
    """An operand that cannot be cut like the tensor that is changed."""


class WholeView:
    """Shows the split parameters of one rank whole to code between steps.

    Args:
        group: the tensor group, whose ranks add the same parameters in the same order.
        sums_later: why gradients of a backward that a hook runs by itself would not be summed over ranks; ``None`` if
            they need not be.

    Attributes:
        hook: name of the hook that runs.
        rounds: in which the ranks meet in a hook that may run other code on each.
    """

    def __init__(self, group: dist.ProcessGroup, sums_later: str | None = None) -> None:
        self._group, self._sums_later = group, sums_later
        self._parameters: dict[int, SeenBetween] = {}
        self._gradients: dict[int, SeenBetween] = {}
        self._numbered: list[SeenBetween] = []
        self._whole = self._serves = False
        self.hook = ""
        self._calls: list[tuple[nn.Module, Any]] = []
        self._kinds = kinds.Kinds(self)
        self.rounds, self._thread = Rounds(group, self._part), 0

    def add(self, parts: ParameterParts, parameter: nn.Parameter) -> None:
        """Show one more parameter whole."""
        if id(parameter) in self._parameters:
            return
        entry = SeenBetween(parts, 2 * len(self._numbered), parameter)
        self._numbered.append(entry)
        self._parameters[id(parameter)] = entry
        weakref.finalize(parameter, self._parameters.pop, id(parameter), None)

    @property
    def is_whole(self) -> bool:
        """Whether code that runs now sees whole tensors."""
        return self._whole

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return next((parameter.device for _, parameter in alive(self._parameters)), device_of(self._group))

    def holds(self, module: nn.Module) -> bool:
        """Whether parameters of a module are split."""
        return any(id(parameter) in self._parameters for parameter in module.parameters())

    @contextmanager
    def seen(self, hook: str, *, serves: bool) -> Iterator[None]:
        """Show whole parameters while a hook runs.

        Args:
            hook: its name, for messages.
            serves: whether ranks may run different code in it.

        Raises:
            RuntimeError: the hook keeps a gathered tensor, or only some ranks changed parameters.
        """
        before = self.hook, self._serves
        self.hook, self._serves = hook, serves and self._group.size() > 1
        self._thread = threading.get_ident()
        handles = (
            nn.modules.module.register_module_forward_pre_hook(self._before_forward),
            nn.modules.module.register_module_forward_hook(self._after_forward, always_call=True),
        )
        try:
            with self._phase(whole=True):
                yield
                while self._serves and not self._round(NOTHING)[1]:
                    pass
        except RuntimeError as error:
            if "returned an invalid gradient" not in str(error):  # torch's words, where it meets a gathered weight
                raise
            raise RuntimeError(
                f"`{self.hook}` runs a backward of its own, through a whole weight of which every rank holds a part. "
                "Add its loss to that of `training_step`, or leave that out."
            ) from error
        finally:
            for handle in handles:
                handle.remove()
            self.hook, self._serves = before

    @contextmanager
    def local(self) -> Iterator[None]:
        """Show parts again, while code of this package runs inside of a hook."""
        with self._phase(whole=False):
            yield

    @contextmanager
    def _phase(self, *, whole: bool) -> Iterator[None]:
        before = self._whole
        self._switch(whole)
        failed = True
        try:
            yield
            failed = False
        finally:
            self._switch(before, forgiving=failed)

    def _switch(self, whole: bool, *, forgiving: bool = False) -> None:
        if whole == self._whole:
            return
        self._whole = whole
        if whole:
            for _, parameter in alive(self._parameters):
                parameter.__class__ = self._kinds.parameter
            for _, gradient in alive(self._gradients):
                gradient.__class__ = self._kinds.tensor
            return
        kept, touched = [], bool(self._gradients)
        for entry, parameter in alive(self._parameters):
            if entry.part is None and not touched:  # nothing was gathered, as by most hooks
                parameter.__class__ = entry.kind
                found = parameter.grad
                if found is None or found.shape == parameter.shape:
                    continue
            if self._put_back(entry, parameter):
                kept.append(entry.parts.name)
        if not forgiving:
            self._refuse_kept(kept)

    def _refuse_kept(self, kept: Sequence[str]) -> None:
        if kept:
            raise RuntimeError(
                f"`{self.hook}` keeps a view of the whole `{kept[0]}`, of which every rank holds a part: it was "
                "gathered for this hook and would not follow later updates. Keep a copy (`clone()`, "
                "`copy.deepcopy`), or read the parameter again when it is needed."
            )

    def _put_back(self, entry: SeenBetween, parameter: Tensor) -> bool:
        """Cut a parameter and its gradient again; returns whether somebody still holds the gathered memory."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            gradient = parameter.grad
            kept = self._cut(entry, parameter)
            known = [(other, tensor) for other, tensor in alive(self._gradients) if other.number == entry.number + 1]
            for other, tensor in known:
                kept |= self._cut(other, tensor)
            if gradient is not None and gradient.shape != parameter.shape:
                part = entry.parts.cut(gradient)
                parameter.grad = known[0][1].copy_(part) if known else part
        return kept

    def _cut(self, entry: SeenBetween, tensor: Tensor) -> bool:
        tensor.__class__ = entry.kind
        if entry.part is None:
            return False
        current = tensor.data
        if tuple(current.shape) != entry.parts.shape:
            raise RuntimeError(
                f"`{self.hook}` gave `{entry.parts.name}` the shape {tuple(current.shape)}; it must stay "
                f"{entry.parts.shape}, of which every rank holds a part."
            )
        entry.part.copy_(entry.parts.cut(current))
        tensor.data, entry.part = entry.part, None
        memory = current.untyped_storage()
        del current
        return memory._cdata == entry.memory and is_kept(memory)

    def touch(self, tensor: Tensor) -> None:
        """Make a tensor whole."""
        entry = self._entry(tensor)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if entry.part is not None:
                return
            refuse_other_threads(self._thread, entry.parts)
            whole = self._round(entry.number)[0] if self._serves else entry.parts.gather(tensor.data)
            entry.part, entry.memory = tensor.data, whole.untyped_storage()._cdata
            entry.before = _checksum(whole) if self._serves else 0.0
            tensor.data = whole
            gradient = tensor.grad if id(tensor) in self._parameters else None
        tensor.__class__ = self._kinds.gathered if id(tensor) in self._parameters else entry.kind
        if gradient is not None:
            self._see(entry, gradient)

    def _entry(self, tensor: Tensor) -> SeenBetween:
        return self._parameters.get(id(tensor)) or self._gradients[id(tensor)]

    def _see(self, entry: SeenBetween, gradient: Tensor) -> Tensor:
        """Show the gradient of a parameter whole as well."""
        if id(gradient) not in self._gradients and tuple(gradient.shape) == entry.parts.spec.local_shape:
            self._gradients[id(gradient)] = SeenBetween(entry.parts, entry.number + 1, gradient)
            weakref.finalize(gradient, self._gradients.pop, id(gradient), None)
            gradient.__class__ = self._kinds.tensor
        return gradient

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """``parameter.grad``, to be seen whole."""
        with torch._C.DisableTorchFunctionSubclass():
            gradient = parameter.grad
        return None if gradient is None else self._see(self._parameters[id(parameter)], gradient)

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._entry(tensor).parts.shape

    def knows(self, tensor: Tensor) -> bool:
        """Whether this view shows a tensor; another one may be open at the same time."""
        return id(tensor) in self._parameters or id(tensor) in self._gradients

    def are_alike(self, one: Tensor, other: Tensor) -> bool:
        """Whether two tensors that are seen are cut in the same way."""
        return self.knows(one) and self.knows(other) and self._entry(one).parts.spec == self._entry(other).parts.spec

    def change_part(self, func: Any, tensor: Tensor, args: Any, kwargs: Any) -> bool:
        """Change every element alike where it is; False if an operand cannot be cut to the same part."""
        entry = self._entry(tensor)
        try:
            given, options = tree_map(lambda value: self._operand(entry, value), (args, kwargs))
        except NotAlike:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            func(tensor, *given, **options)
        entry.writes += 1
        return True

    def on_parts(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """A parameter is read whole."""
        return None

    def _operand(self, entry: SeenBetween, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        if isinstance(value, kinds.Seen):
            if not self.knows(value) or self._entry(value).parts.spec != entry.parts.spec:
                raise NotAlike
            with torch._C.DisableTorchFunctionSubclass():
                return value.as_subclass(Tensor)
        return entry.parts.cut(value.expand(entry.parts.shape))

    def copied(self, parameter: nn.Parameter) -> nn.Parameter:
        """A deep copy, of the part: that is what a copied layer computes with. Hooks see it whole as well."""
        entry = self._parameters[id(parameter)]
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            data = parameter.data.as_subclass(Tensor)
            made = nn.Parameter(data.clone() if entry.part is None else entry.parts.cut(data), parameter.requires_grad)
        self.add(entry.parts, made)
        if self._whole:
            made.__class__ = self._kinds.parameter
        return made

    def hooked(self, parameter: nn.Parameter, hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """A gradient hook that is given the whole gradient, and may return one."""
        return kinds.WholeGradientHook(self._parameters[id(parameter)].parts, hook)

    def _round(self, asked: float) -> tuple[Any, bool]:
        """Gather what any rank asks for; returns what this one asked for, and whether nobody asked.

        Raises:
            RuntimeError: all are done, and only some have changed parameters.
        """
        found, notes = self.rounds.ask(asked, self._changes() if asked == NOTHING else 0.0, self.device)
        nobody = all(number == NOTHING for number, _ in notes)
        if nobody and len({changes for _, changes in notes}) > 1:
            raise RuntimeError(
                f"`{self.hook}` changed parameters or gradients that are split over {len(notes)} ranks on some of "
                "them only, so that their parts no longer belong together. Change them on every rank: not under "
                "`if self.trainer.is_global_zero` or `@rank_zero_only`."
            )
        return found, nobody

    def _part(self, number: int, _: float) -> tuple[ParameterParts, Tensor]:
        """This rank's part of what another rank asks for."""
        entry = self._numbered[number // 2]
        with torch._C.DisableTorchFunctionSubclass():
            tensor = entry.tensor()
            tensor = tensor.grad if number % 2 and tensor is not None else tensor
            if tensor is None:
                raise RuntimeError(
                    f"`{self.hook}` reads the gradient of `{entry.parts.name}` on another rank; there is none here."
                )
            data = tensor.data.as_subclass(Tensor)
        whole = tuple(data.shape) == entry.parts.shape and entry.parts.shape != entry.parts.spec.local_shape
        return entry.parts, entry.parts.cut(data) if whole else data

    def _changes(self) -> float:
        """This rank's changes in the hook, as a number."""
        total = 0.0
        with torch._C.DisableTorchFunctionSubclass():
            for entry, tensor in self._seen_now():
                gathered = entry.part is not None
                total += (entry.number + 1) * (
                    entry.writes + (_checksum(tensor.data) - entry.before if gathered else 0)
                )
        return total

    def _seen_now(self) -> list[tuple[SeenBetween, Tensor]]:
        return [*alive(self._parameters), *alive(self._gradients)]

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        """A layer that is called in a hook computes with parts."""
        if self._whole and self.holds(module):
            phase = self._phase(whole=False)
            phase.__enter__()
            self._calls.append((module, phase))

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._calls and self._calls[-1][0] is module and not self._whole:
            self._calls.pop()[1].__exit__(None, None, None)
            if self._sums_later is not None:
                tree_map(functools.partial(refuse_backward, self.hook, self._sums_later), output)


def refuse_backward(hook: str, reason: str, output: Any) -> None:
    """Stop a backward that starts in a hook where its gradients would stay terms."""
    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(functools.partial(_own_backward, hook, reason))


def _own_backward(hook: str, reason: str, gradient: Tensor) -> None:
    raise RuntimeError(
        f"`{hook}` runs a backward of its own, whose gradients are not summed over ranks with {reason}. Add its loss "
        "to that of `training_step`, or leave that out."
    )


def alive(entries: dict[int, SeenBetween]) -> Iterable[tuple[SeenBetween, Tensor]]:
    """Entries whose tensors somebody still has, with these."""
    return [(entry, tensor) for entry in list(entries.values()) if (tensor := entry.tensor()) is not None]


def _checksum(values: Tensor) -> float:
    flat = values.reshape(-1).double()
    return float(flat @ torch.linspace(1, 2, flat.numel(), dtype=torch.float64, device=flat.device))
