"""Whose numbers are these? Follows values through one run of the user's step.

Between the parts of a module the user's code computes what it likes: a mask from the embedding's output, a teacher's
logits, a number for the log. On a stage that lacks the part, such a value is made of stand-ins. Gradients show some of
them, since every stand-in hangs on a sentinel; a mask, a detached value or anything in evaluation has no gradient. So
the first run of every kind of step is watched, call by call of torch's functions::

    made   depends on parameters or layers that not every stage has   real here; must be sent along
    away   depends on a stand-in                                      zeros here; must not be used

What is *made* and passed to the first layer of the next stage is sent with the hidden state. What is *away* and gets
into a layer of this stage, a log, a metric or the step's output is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric

from lightning_megatron.pipeline.elsewhere.absent import absent_tensors, writes_in_place
from lightning_megatron.pipeline.elsewhere.inner_gradients import check_inner_gradient
from lightning_megatron.pipeline.elsewhere.presence import Presence

_LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEW = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided")
_WATCHED_AGAIN = 200
_TESTS = ("isnan", "isinf", "isfinite")
# Only the shape or the type of their tensors goes into what these return.
_BLIND = frozenset(
    getattr(owner, name) for owner in (torch, Tensor) for name in (*_LIKE, *_NEW, *_TESTS) if hasattr(owner, name)
)
# Only the first argument's numbers go into what these return.
_FIRST_ONLY = frozenset(
    getattr(Tensor, name) for name in ("to", "type_as", "expand_as", "view_as", "reshape_as", "type")
)
_READS = frozenset(
    getattr(Tensor, name) for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__")
) | {torch.equal, torch.allclose, Tensor.equal, Tensor.allclose, torch.is_nonzero}


class WatchPlan:
    """Which runs of steps are watched: the first of each kind, and more of them once a step has logged something new.

    A number that is logged now and then, ``if self.global_step % 50 == 0``, is not in the first run. After its first
    time the steps of that name are watched until it comes again.
    """

    def __init__(self) -> None:
        self._done: set[tuple[tuple[int, int], str]] = set()
        self._logged: dict[str, set[str]] = {}
        self._awaited: dict[str, set[str]] = {}
        self._left: dict[str, int] = {}
        self._watching = False

    def is_done(self, bounds: tuple[int, int], where: str) -> bool:
        """Whether the next run of the layers ``bounds`` in the step ``where`` need not be watched."""
        return (bounds, where) in self._done and not self._awaited.get(where)

    def note_run(self, bounds: tuple[int, int], where: str) -> None:
        """Say that such a run was watched."""
        self._done.add((bounds, where))
        self._watching = True

    def note_logged(self, where: str, names: list[str]) -> None:
        """Say what a whole step has logged, in all its runs."""
        logged = self._logged.setdefault(where, set())
        if not self._watching and logged.issuperset(names):
            return
        awaited = self._awaited.setdefault(where, set())
        if self._watching:
            logged.update(names)
            awaited.difference_update(names)
            self._left[where] = self._left.get(where, _WATCHED_AGAIN) - 1
        else:
            awaited.update(set(names) - logged)
        self._watching = False
        if self._left.get(where, _WATCHED_AGAIN) <= 0:  # logged once, it seems: watching has its price
            logged.update(awaited)
            awaited.clear()


class Provenance(TorchFunctionMode):
    """Watches one run of a step on one virtual stage.

    Args:
        module: the user's module, cut.
        presence: what of it is here.
        received: what the stage before sent.
    """

    def __init__(self, module: nn.Module, presence: Presence, received: list[Tensor]) -> None:
        super().__init__()
        self._presence = presence
        self._received = received
        named = module.named_parameters(remove_duplicate=False)
        self._own = frozenset(id(parameter) for name, parameter in named if not presence.is_everywhere(name))
        self._foreign = {id(tensor): part for tensor, part in absent_tensors(module, presence)}
        self._made: dict[int, Tensor] = {}
        self._away: dict[int, tuple[Tensor, str]] = {}
        self._paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        check_inner_gradient(func, args, kwargs, self._received, self._own)
        output = func(*args, **kwargs)
        if self._paused or func in _BLIND:
            return output
        sources = args[:1] if func in _FIRST_ONLY else (args, kwargs)
        name = self.away_from(sources)
        if name is not None and func in _READS:
            raise RuntimeError(
                f"the step reads, in Python, a number that depends on `{name}`, which another pipeline stage owns "
                f"(`{getattr(func, '__name__', func)}`). {self._remedy(name)}"
            )
        if name is not None or self._any_made(sources):
            self._note(output, name)
            if writes_in_place(getattr(func, "__name__", "")) and args:
                self._note(args[0], name)
            if "out" in kwargs:
                self._note(kwargs["out"], name)
        return output

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Look away: inside a layer, and while stand-ins are made."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def note_made(self, value: Any) -> None:
        """Say that the tensors in ``value`` were computed here."""
        self._note(value, None)

    def note_away(self, value: Any, name: str) -> None:
        """Say that the tensors in ``value`` stand in for what ``name`` computes elsewhere."""
        self._note(value, name)

    def away_from(self, value: Any) -> str | None:
        """Name of a part of another stage that the numbers in ``value`` depend on."""
        for tensor in _tensors(value):
            if id(tensor) in self._away:
                return self._away[id(tensor)][1]
            if id(tensor) in self._foreign:
                return self._foreign[id(tensor)]
        return None

    def travels(self, tensor: Tensor) -> bool:
        """Whether the next stage cannot compute ``tensor`` for itself."""
        return id(tensor) in self._made or id(tensor) in self._own

    def refuse_away(self, value: Any, what: str) -> None:
        """Complain if the numbers in ``value`` are not those of one process.

        Raises:
            RuntimeError: naming the part and the way out.
        """
        name = self.away_from(value)
        if name is not None:
            raise RuntimeError(f"{what} depends on `{name}`, which another pipeline stage owns. {self._remedy(name)}")

    def refuse_away_metrics(self, module: nn.Module) -> None:
        """:meth:`refuse_away` for the states of all torchmetrics objects in ``module``."""
        for name, metric in module.named_modules():
            if isinstance(metric, Metric):
                self.refuse_away([getattr(metric, state) for state in metric._defaults], f"the metric `{name}`")

    def _remedy(self, name: str) -> str:
        part = self._presence.part_of(name)
        return remedy(name, part is not None and part.is_layer)

    def _any_made(self, value: Any) -> bool:
        return any(self.travels(tensor) for tensor in _tensors(value))

    def _note(self, value: Any, name: str | None) -> None:
        for tensor in _tensors(value):
            if name is None:
                self._made[id(tensor)] = tensor
                self._away.pop(id(tensor), None)
            else:
                self._away[id(tensor)] = (tensor, name)


def remedy(name: str, is_layer: bool) -> str:
    """What to do about a value that depends on the part ``name`` of another stage."""
    if is_layer:
        return (
            "What layers compute reaches later stages only through the arguments of the layers after them: pass it "
            "through all of them, or use `pipeline_parallel_size=1`. (A penalty on weights of layers is the "
            "optimizer's `weight_decay`.)"
        )
    return (
        "Keep that part on every stage with "
        f'`MegatronStrategy(pipeline_placement={{"{name}": "all"}})` (its gradients are summed), or use '
        "`pipeline_parallel_size=1`."
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
