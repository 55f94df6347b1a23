"""Numbers of the parameters of all pipeline stages in one call of a hook; see :mod:`.over_stages`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megatron.layers.whole.seen_kinds import gather_others
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.parts.packages import PACKAGE, comes_from, module_of
from lightning_megatron.mesh.torch_functions import line_of_user
from lightning_megatron.pipeline.elsewhere.absent import KNOWN, TENSOR_ATTRIBUTES, Absent
from lightning_megatron.pipeline.elsewhere.away import LARGEST, TAKES_NUMBERS, tensors_in, writes_in_place
from lightning_megatron.pipeline.elsewhere.presence import Phase, owner_of
from lightning_megatron.pipeline.stage.stage import Stage

_READS = frozenset(
    (
        *("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__"),
        *("equal", "allclose", "is_nonzero"),
    )
)


class StageNumbers(TorchFunctionMode):
    """Around one call of a hook: knows which stages have which tensors, and sends numbers.

    Args:
        module: the user's module, cut.
        stage: this rank's.
        group: the stages of this replica.
        hook: name of the hook.
        noted: the stages that have tensors, kept from one call to the next, as hooks keep these.

    Attributes:
        active: whether code of the user runs.
    """

    def __init__(self, module: nn.Module, stage: Stage, group: dist.ProcessGroup, hook: str, noted: Any) -> None:
        super().__init__()
        self._viewer = stage
        self._module, self._presence, self._group, self._hook = module, stage.presence, group, hook
        self._stage, self._everyone, self._noted = stage.stage, stage.presence.stages, noted
        self._without, self._absent = set[int](), set[int]()
        self.active, self._gradients = True, 0

    def begin(self) -> None:
        """Note who has which parameter, and which have no gradient or are frozen; collective over the stages."""
        self._without, self._absent = set(), set()
        bare, frozen = list[str](), list[str]()
        for name, parameter in type(self._module).named_parameters(self._module):
            stages = self._stages_of_name(name)
            if stages is not None:
                self._noted[parameter] = stages
                with torch._C.DisableTorchFunctionSubclass():
                    if parameter.grad is None:
                        bare.append(self._presence.entries[name].first)
                    if not parameter.requires_grad:
                        frozen.append(self._presence.entries[name].first)
        for name, buffer in type(self._module).named_buffers(self._module):
            if (stages := self._stages_of_name(name)) is not None and type(buffer) is not Absent:
                self._noted[buffer] = stages
        told = objects.gather((self._hook, bare, frozen), self._group)
        if any(hook != self._hook for hook, *_ in told):
            self._refuse("is called")
        named, untrained = ({name for each in told for name in each[at]} for at in (1, 2))
        entries = self._presence.entries.values()
        self._gradients = len({e.first for e in entries if isinstance(e.twin, nn.Parameter)} - named)
        for name, entry in self._presence.elsewhere():
            owner, leaf = owner_of(self._module, name)
            if owner is not None and isinstance(entry.twin, nn.Parameter):
                absent = getattr(owner, leaf)
                entry.twin.requires_grad_(entry.first not in untrained)
                self._absent.add(id(absent))
                if (stages := self._stages_of_name(name)) is not None:
                    self._noted[absent] = stages
                if entry.first in named:
                    self._without.add(id(absent))

    def end(self) -> None:
        """Say that the hook has ended here; collective over the stages."""
        self._exchange(None, {})

    def are_all_gradients(self, tensors: Sequence[Tensor], here: bool) -> bool:
        """Whether ``tensors`` of all stages are the gradients of the model, as those of this stage are if they are
        ``here``; collective over the stages, unless their number tells.
        """
        if len(tensors) != self._gradients:
            return False
        told = self._exchange("gradients", {self._stage: torch.tensor(here)})
        return all(bool(said) for said in told.values())

    def known(self, number: Tensor, tensors: Iterable[Tensor]) -> Tensor:
        """``number`` with its value on all stages that have any of ``tensors``; collective over the stages."""
        have, everyone = self._stages_of(number), frozenset(range(self._everyone))
        if have is None or all((self._stages_of(tensor) or everyone) <= have for tensor in tensors):
            return number
        return self._fetch("known", None, (number,), {})[0][0]  # type: ignore[no-any-return]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.active or _is_own(sys._getframe(1)):
            return func(*args, **kwargs)
        found = [tensor for tensor in tensors_in((args, kwargs)) if self._stages_of(tensor) is not None]
        if not found:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if any(type(tensor) is Absent for tensor in found):  # else another stage gathers them, and waits for this one
            gather_others(tensors_in((args, kwargs)))
        attribute = func.__self__.__name__ if name in ("__get__", "__set__") else ""
        if name in KNOWN or (name == "__get__" and attribute not in TENSOR_ATTRIBUTES):
            return func(*args, **kwargs)
        if attribute == "grad" and type(args[0]) is Absent and id(args[0]) in self._absent:
            return self._absent_gradient(func, name, args)
        if name == "__deepcopy__":  # its other argument holds all that is copied with it
            return self._run(func, args, kwargs, self._met(args[:1], {}))
        if name.startswith("_foreach"):
            return self._one_by_one(func, name, args, kwargs)
        return self._call(func, name, args, kwargs)

    def _call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        writes = name == "__set__" or writes_in_place(name)
        target = next(tensors_in(args[:1]), None) if writes else kwargs.get("out")
        takes = name in _READS or func in TAKES_NUMBERS
        if takes or len(self._met(args, kwargs)) > 1 or (target is not None and self._stages_of(target) is None):
            args, kwargs = self._fetch(name, target, args, kwargs)
            left = self._met(args, kwargs)
            if left and (takes or len(left) > 1 or (target is not None and self._stages_of(target) is None)):
                self._refuse_large(name, args, kwargs)
        return self._run(func, args, kwargs, self._met(args, kwargs))

    def _run(self, func: Any, args: Any, kwargs: Any, met: set[frozenset[int]]) -> Any:
        output = func(*args, **kwargs)
        for tensor in tensors_in(output) if met else ():
            self._noted[tensor] = next(iter(met))
        return output

    def _absent_gradient(self, func: Any, name: str, args: Any) -> Any:
        """``.grad`` of a parameter of another stage, which may have none."""
        if name == "__get__":
            if id(args[0]) in self._without:
                return None
            gradient, stages = func(*args), self._stages_of(args[0])
            if gradient is not args[0] and stages is not None:  # in a step by hand; a tied weight is of several stages
                self._noted[gradient] = stages
            return gradient
        (self._without.add if args[1] is None else self._without.discard)(id(args[0]))
        return func(*args)

    def _one_by_one(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A function of lists of tensors, some of which are absent."""
        many, outputs = len(args[0]), []
        for index in range(many):
            each = [[a[index]] if isinstance(a, (list, tuple)) and len(a) == many else a for a in args]
            outputs.append(self._call(func, name, each, kwargs))
        return (
            None if any(output is None for output in outputs) else [tensor for output in outputs for tensor in output]
        )

    def _stages_of(self, tensor: Tensor) -> frozenset[int] | None:
        """The stages that have the numbers of a tensor; ``None`` for all."""
        if type(tensor) is Absent and tensor not in self._noted:
            part = self._presence.part_of(tensor.part)
            return None if part is None else part.stages
        return self._noted.get(tensor)  # type: ignore[no-any-return]

    def _stages_of_name(self, name: str) -> frozenset[int] | None:
        entry = self._presence.entries.get(name)  # of a tied one the stages of all its names
        return None if entry is None or len(entry.stages) == self._everyone else entry.stages

    def _met(self, args: Any, kwargs: Any) -> set[frozenset[int]]:
        return {stages for t in tensors_in((args, kwargs)) if (stages := self._stages_of(t)) is not None}

    def _fetch(self, name: str, target: Tensor | None, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with the numbers of all small tensors that some stages only have."""
        wanted: dict[int, tuple[Tensor, frozenset[int]]] = {}
        for tensor in tensors_in((args, kwargs)):
            stages = self._stages_of(tensor)
            if stages is not None and tensor is not target and tensor.numel() <= LARGEST:
                wanted[id(tensor)] = tensor, stages
        if not wanted:
            return args, kwargs
        about = name, tuple((tuple(sorted(stages)), tuple(tensor.shape)) for tensor, stages in wanted.values())
        own = {
            place: tensor.detach().cpu()
            for place, (tensor, stages) in enumerate(wanted.values())
            if self._stage == min(stages)
        }
        known = self._exchange(about, own)
        numbers = {key: known[place].to(tensor.device) for place, (key, (tensor, _)) in enumerate(wanted.items())}
        return _with_numbers(args, numbers), _with_numbers(kwargs, numbers)

    def _exchange(self, about: Any, own: dict[int, Tensor]) -> dict[int, Tensor]:
        told = objects.gather((about, own), self._group)
        if any(other != about for other, _ in told):
            self._refuse("does other things")
        return {place: tensor for _, mine in told for place, tensor in mine.items()}

    def _refuse(self, what: str) -> None:
        raise RuntimeError(
            f"`{self._hook}` goes over all parameters, and {what} on other pipeline stages in another order"
            f" ({line_of_user()}). Let it run the same lines on every rank, over `self.parameters()` and not over what "
            "a rank has kept from an earlier call, build a copy that follows a network in `__init__` or `setup` and "
            "freeze it (`requires_grad_(False)`), or use `pipeline_parallel_size=1`."
        )

    def _refuse_large(self, name: str, args: Any, kwargs: Any) -> None:
        parts = [tensor.part for tensor in tensors_in((args, kwargs)) if type(tensor) is Absent]
        raise RuntimeError(
            f"`{self._hook}` brings together, by `{name}`, tensors of more than {LARGEST} elements that different "
            f"pipeline stages have{f', among them of `{min(parts)}`' if parts else ''} ({line_of_user()}). Numbers "
            "made of each parameter by itself, such as norms and sums, may meet. A copy that follows a network is kept "
            "on every stage where it is frozen (`requires_grad_(False)`). Or use `pipeline_parallel_size=1`."
        )


class NumbersByHand(StageNumbers):
    """The same in a step of manual optimization: between a backward of its own and the next pass, where it may list
    parameters. :meth:`begin` is called after each backward.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._viewer.phase(lists=True) is Phase.STEP:
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _with_numbers(value: Any, numbers: Mapping[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return numbers.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return type(value)([_with_numbers(item, numbers) for item in value])
    if isinstance(value, dict):
        return {key: _with_numbers(item, numbers) for key, item in value.items()}
    return value


def _is_own(frame: FrameType) -> bool:
    """Whether code of this package computes, as where a weight that was seen whole is cut again."""
    return comes_from(frame, PACKAGE) and module_of(frame) != __name__
