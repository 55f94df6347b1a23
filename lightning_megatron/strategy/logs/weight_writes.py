"""Weights that a step itself writes, besides the optimizer: clamped, decayed, copied to a target network.

So does a step that writes its optimizer's state; see :mod:`~lightning_megatron.strategy.optimizers.optimizer_states`.

One process writes them once per batch. The micro-batches of a batch would write them one after the other, and each
would compute with what the ones before have left. So a trial of the step notes every write below torch's own
dispatcher, where those through ``.data``, views and ``nn.init`` arrive as well, and puts the weights back; a step that
runs in parts looks at how often its weights were written (their version), which costs nothing. Writes through ``.data``
have no version: where ``.data`` occurs in the code that a step may reach, it looks at sums of its weights as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from lightning_megatron.data_parallel.renormalised_rows import renormalises
from lightning_megatron.mesh.autograd import versions_of
from lightning_megatron.mesh.marks import Marks
from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.mesh.parts.packages import PACKAGE, comes_from
from lightning_megatron.mesh.torch_functions import OperatorWatch, Run
from lightning_megatron.pipeline.elsewhere.undo import Contents
from lightning_megatron.strategy.optimizers.optimizer_states import StatesInRuns, StateTables, states_of

_RENORMALISES = "aten::embedding_renorm_"
_ASSIGNS = frozenset(
    f"aten::{name}{mark}"
    for name in ("index_put", "index_copy", "index_fill", "masked_fill", "masked_scatter", "scatter", "copy", "where")
    for mark in ("", "_")
) | {"aten::_index_put_impl_", "aten::select_scatter", "aten::slice_scatter"}
_ROOMS = ("data_parallel", "mesh.messages", "strategy.generation")
_WATCHES = f"{PACKAGE}.mesh.torch_functions"
_MOVES_WEIGHTS = tuple(f"{PACKAGE}.{room}" for room in _ROOMS)

Known = Callable[[nn.Module], bool]

WeightName = tuple[str, str]
"""Of the module that has it, and its attribute there."""


class WeightsArrive:
    """Attached to a module whose weights come and go in a step, into other memory each time."""


class WeightWrites:
    """Notes which weights of a module a run writes, and keeps what they were before.

    Args:
        module: the user's module.

    Attributes:
        found: names of weights that were written in any run since.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.found: set[WeightName] = set()
        self._assigned: dict[int, StorageWeakRef] = {}
        self._before: dict[WeightName, Contents] = {}
        self._bound: list[tuple[Tensor, Tensor]] = []
        self._states: StateTables | None = None
        self._left: dict[WeightName, set[float]] = {}

    @property
    def unlike(self) -> list[WeightName]:
        """State of optimizers that runs on unlike samples have left unlike, each from the same beginning."""
        return sorted(name for name, sums in self._left.items() if len(sums) > 1)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Around a run of code that may write them; not those that come and go in a step, with `weight_sharding`."""
        shortened = {path for path, child in self._module.named_modules() if renormalises(child)}
        stay = Marks.of(self._module).get(WeightsArrive) is None
        with torch._C.DisableTorchFunction():  # else those who watch uses would see one here
            places = self._places()
            bound = [(name, w, w.data) for here in places.values() for _, _, name, w in here if stay]
            self._states = self._states or StateTables(self._module)
        try:
            with _Writes(places, self._note, shortened, self._assigned):
                yield
        finally:
            with torch._C.DisableTorchFunction():
                self._note_rebound(bound)
                self.found |= self._states.changed()

    def assigns(self, tensor: Any) -> bool:
        """Whether elements of a tensor were given values in the latest run, whatever they were before."""
        return _is_plain(tensor) and StorageWeakRef(tensor.untyped_storage()).cdata in self._assigned

    def _note_rebound(self, bound: Sequence[tuple[WeightName, Tensor, Tensor]]) -> None:
        """Weights that are in other memory than before, by ``weight.data = ...``: no operator has written them."""
        for name, weight, data in bound:
            here = not weight.is_meta and data.untyped_storage().nbytes() and weight.untyped_storage().nbytes()
            if here and weight.data_ptr() != data.data_ptr():
                self.found.add(name)
                self._bound.append((weight, data))

    def put_back(self) -> None:
        """Leave them as they were."""
        with torch._C.DisableTorchFunctionSubclass():
            for weight, data in reversed(self._bound):
                weight.data = data
            if self._states is not None:
                for place, key, each in states_of(self._module) if self.found else ():
                    if (place, key) in self.found:
                        self._left.setdefault((place, key), set()).add(float(each.sum(dtype=torch.float64)))
                self._states.put_back()
            for before in self._before.values():
                before.rewind()
        self._before, self._bound, self._states, self._assigned = {}, [], None, {}

    def _note(self, name: WeightName, weight: Tensor) -> None:
        if name not in self._before:
            self.found.add(name)
            with torch._C.DisableTorchFunctionSubclass():  # of a split weight, the part that is here
                self._before[name] = Contents.of_tensor(weight)

    def _places(self) -> dict[int, list[tuple[int, int, WeightName, Tensor]]]:
        """Storage -> the weights in it: first and last element, name, weight."""
        found: dict[int, list[tuple[int, int, WeightName, Tensor]]] = {}
        for path, key, weight in (*weights_of(self._module), *states_of(self._module)):
            if weight.is_meta or not weight.numel() or not weight.untyped_storage().nbytes():
                continue
            storage = weight.untyped_storage().data_ptr()
            found.setdefault(storage, []).append((*_span(weight), (path, key), weight))
        return found


class _Writes(OperatorWatch):
    """Tells of every weight that an operator is about to write."""

    def __init__(
        self,
        places: Mapping[int, list[tuple[int, int, WeightName, Tensor]]],
        note: Callable[[WeightName, Tensor], None],
        shortened: set[str],
        assigned: dict[int, StorageWeakRef],
    ) -> None:
        self._places, self._note, self._shortened, self._assigned = places, note, shortened, assigned

    def seen(self, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of an operator."""
        if func._schema.is_mutable:
            for tensor in _written(func, args, kwargs):
                self._tell(func, tensor)
        result = run(func, args, kwargs)
        if func._schema.name in _ASSIGNS and _is_plain(result) and _assigns(args, kwargs):
            holder = StorageWeakRef(result.untyped_storage())
            self._assigned[holder.cdata] = holder  # no other storage is where this was, as long as it is held
        return result

    def _tell(self, func: Any, tensor: Tensor) -> None:
        if type(tensor).__torch_dispatch__ != Tensor.__torch_dispatch__ or tensor.is_meta or not tensor.numel():
            return
        near = self._places.get(tensor.untyped_storage().data_ptr(), ())
        first, last = _span(tensor) if near else (0, 0)
        met = [(name, weight) for start, end, name, weight in near if first <= end and start <= last]
        if not met or _moves_weights():
            return
        if func._schema.name == _RENORMALISES and len(met) == 1 and met[0][0][0] in self._shortened:
            return  # rows that are about to be looked up, each by itself and once
        for name, weight in met:
            self._note(name, weight)


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter) and not value.is_meta


def _assigns(args: Any, kwargs: Any) -> bool:
    """Whether an operator overwrites elements: it neither adds to them nor copies a tensor onto itself, as ``+=`` does
    behind an integer."""
    if len(args) < 2 or kwargs.get("accumulate") or "reduce" in kwargs:
        return False
    if isinstance(args[-1], str) or (len(args) > 3 and args[3] is True):
        return False  # `reduce="add"`, `accumulate=True`
    target, source = args[0], args[1]
    return not isinstance(source, Tensor) or target.untyped_storage()._cdata != source.untyped_storage()._cdata


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name, args[place] if place < len(args) else None)
            yield from (leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor))


def _span(tensor: Tensor) -> tuple[int, int]:
    """Its first and last byte in its storage."""
    size, start = tensor.element_size(), int(tensor.storage_offset())
    reach = sum(int(length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * size, (start + reach + 1) * size - 1


def _moves_weights() -> bool:
    """Whether the write is this package's, which gathers weights or lets them come and go."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if not comes_from(frame, "torch", __name__, _WATCHES, "contextlib"):
            return comes_from(frame, *_MOVES_WEIGHTS)
        frame = frame.f_back
    return False


def weights_of(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Module, attribute and tensor of all parameters that are here."""
    for path, child in module.named_modules():
        for key, weight in child._parameters.items():
            if weight is not None and not is_lazy(weight):
                yield path, key, weight


class WrittenInRuns:
    """Refuses weights that a step writes where its code runs more than once for a batch; looks at their versions.

    Args:
        module: the user's module.
        layers: names of the trunk's layers.
        known: whether a weight, by module, may be written several times.
        stages: number of pipeline stages.
        unseen: whether the step may write without a new version.
    """

    def __init__(
        self, module: nn.Module, layers: Sequence[str], known: Known, stages: int, *, unseen: bool = False
    ) -> None:
        self._states = StatesInRuns(module, stages)
        inside, modules = Parts(layers), dict(module.named_modules())
        self._all = [each for each in weights_of(module) if not known(modules[each[0]])]
        self._around = [each for each in self._all if each[0] not in inside]
        self._watched: list[tuple[str, str, Tensor]] = []
        self._before, self._parts = list[int](), 1
        self._unseen, self._sums = unseen, list[list[float]]()

    def begin(self, parts: int, chunks: int) -> None:
        """At the start of a batch.

        Args:
            parts: how many micro-batches it has.
            chunks: how many virtual stages this rank has: the code around the layers runs in each of them.
        """
        self._parts = parts
        self._states.begin(parts)
        self._watched = self._all if parts > 1 else self._around if chunks > 1 else []
        self._before = versions_of([weight for _, _, weight in self._watched])
        self._sums = self._summed()

    def check(self) -> None:
        """After the first run of the batch.

        Raises:
            RuntimeError: a weight was written, or the state of an optimizer.
        """
        self._states.check()
        if not self._watched:
            return
        watched, before, sums = self._watched, self._before, self._sums
        versions, now = versions_of([weight for _, _, weight in watched]), self._summed()
        self._watched, self._before, self._sums = [], [], []
        if versions == before and now == sums:
            return
        for index, (path, key, _) in enumerate(watched):
            if versions[index] != before[index] or (sums and sums[index] != now[index]):
                self._refuse(f"{path}.{key}" if path else key)

    @torch.no_grad()
    def _summed(self) -> list[list[float]]:
        """Of each watched weight, the sum and the norm of its elements, which are equal where it is."""
        if not self._unseen or not self._watched:
            return []
        with torch._C.DisableTorchFunctionSubclass():
            weights = [weight.detach() for _, _, weight in self._watched]
            own = [not weight.is_meta and weight.is_floating_point() and weight.numel() > 0 for weight in weights]
            here = [weight for weight, mine in zip(weights, own, strict=True) if mine]
            if not here:
                return []
            sums = torch.stack([weight.sum(dtype=torch.float64) for weight in here])
            norms = torch.stack([norm.double() for norm in torch._foreach_norm(here)])
            found = iter(torch.stack([sums, norms], 1).nan_to_num().tolist())
            return [next(found) if mine else [] for mine in own]

    def _refuse(self, name: str) -> None:
        if self._parts > 1:
            raise RuntimeError(
                f"the step writes the weight `{name}`, and would again in each of the {self._parts} micro-batches of "
                "the batch: nothing had shown it before this step. Write it from the first step on (whole batches then "
                "run), in a hook (`on_train_batch_start`, `on_train_batch_end`), or set `micro_batch_size` to the size "
                "of a batch."
            )
        raise RuntimeError(
            f"the step writes the weight `{name}`, and its code runs once for each virtual stage of a rank. Write it "
            "in a hook (`on_train_batch_start`, `on_train_batch_end`), or use a schedule of one stage per rank, "
            "`pipeline_schedule='1f1b'`."
        )
