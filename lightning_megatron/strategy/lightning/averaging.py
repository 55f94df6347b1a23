"""Lightning's averaging callbacks at every layout: each rank averages what it holds.

``StochasticWeightAveraging``, ``WeightAveraging`` and ``EMAWeightAveraging`` copy the module before it is divided, and
walk copy and module side by side. Averages are taken number by number, so a rank can do that for its own parts alone:
in place of the copy stands :class:`HeldTensors`, this rank's tensors as checkpoints keep them (slices of split layers,
float32 weights where layers hold 16 bits). The callbacks' own formulas run on it::

    callback          in one process             here
    update            copy ← f(copy, module)     held ← f(held, tensors that this rank has)
    swap, transfer    copy ↔ module              held ↔ tensors that this rank has, then what depends on them
    checkpoint        whole states               parts, stored as the weights are

The callbacks get methods of their own for the time of a run.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_megatron.mesh.parts.pieces import PiecedTensor, as_pieces, plain_if_whole
from lightning_megatron.mesh.replaced import Replacement, Replacements, own_method
from lightning_megatron.strategy.lightning.trainer_access import callbacks_of
from lightning_megatron.strategy.saving.model_state import ModelState, PartOfState

OnParts = Callable[[Callable[..., Any]], Callable[..., Any]] | None
"""Makes a function meet this rank's parts where hooks see whole weights; None where they see none."""
_Averaging = (StochasticWeightAveraging, WeightAveraging)
_OF_AVERAGES = ("_swap_models", "_copy_average_to_current", "on_load_checkpoint")
_OF_SWA = ("update_parameters", "transfer_weights")
_LIGHTNINGS_LOAD = WeightAveraging.on_load_checkpoint


class HeldTensors(nn.Module):
    """This rank's part of a module's state as parameters and buffers of a flat module.

    Args:
        state: by name, tensors and pieces; the memory is shared with them.
        parameters: names of the module's parameters; the others are buffers.
    """

    def __init__(self, state: Mapping[str, Any], parameters: Iterable[str]) -> None:
        super().__init__()
        known = set(parameters)
        self.specs = {n: as_pieces(v).spec for n, v in state.items() if isinstance(v, (Tensor, PiecedTensor))}
        self.extra = {name: value for name, value in state.items() if name not in self.specs}
        for number, name in enumerate(self.specs):
            local = as_pieces(state[name]).local
            if name in known:
                self.register_parameter(str(number), nn.Parameter(local, requires_grad=False))
            else:
                self.register_buffer(str(number), local)

    def pieces(self) -> dict[str, PiecedTensor]:
        """By name, with the memory that is held here."""
        return {n: PiecedTensor(spec, getattr(self, str(i)).detach()) for i, (n, spec) in enumerate(self.specs.items())}

    def fill(self, state: Mapping[str, Any]) -> None:
        """Take over values: pieces like those here, or whole tensors; names that are not there keep theirs."""
        for name, own in self.pieces().items():
            value = state.get(name)
            if isinstance(value, PiecedTensor):
                own.local.copy_(value.local)
            elif isinstance(value, Tensor):
                own.local.copy_(own.spec.slice_full(value))

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """This rank's part, as :class:`PartOfState`; inside another module's, under ``prefix``."""
        state = PartOfState({n: plain_if_whole(pieces) for n, pieces in self.pieces().items()} | self.extra)
        if destination is None:
            return state
        destination.update({prefix + name: value for name, value in state.items()})
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Inverse of :meth:`state_dict`."""
        self.fill(state_dict)
        return nn.modules.module._IncompatibleKeys([], [])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.fill({name: state_dict[prefix + name] for name in self.specs if prefix + name in state_dict})


@contextmanager
def averages_parts(trainer: pl.Trainer) -> Iterator[None]:
    """Within, no averaging callback of a Trainer copies the whole module; each waits for :func:`begin_averages`."""
    with Replacements() as replaced:
        for callback in callbacks_of(trainer):
            if isinstance(callback, _Averaging):
                _Below(callback, "setup", _nothing, replaced)
        yield


def begin_averages(
    trainer: pl.Trainer,
    weights: ModelState,
    device: torch.device,
    on_parts: OnParts,
    *,
    fits: bool = True,
) -> None:
    """Give every averaging callback its average, which is equal to the weights, and methods that work on parts.

    Called before a fit, when gradients and optimizers are laid out: where layers hold 16 bits, the float32 weights
    are there from then on.

    Args:
        trainer: of the run.
        weights: state of the divided module.
        device: of this rank; averages lie there unless the callback has one of its own.
        on_parts: see :data:`OnParts`.
        fits: whether weights are trained; else an average of an earlier run goes on, and there are no new ones.
    """
    for callback in callbacks_of(trainer):
        if not isinstance(callback, _Averaging):
            continue
        setup = callback.__dict__.get("setup")
        replaced = setup.replaced if isinstance(setup, _Below) else Replacements()
        own = _Own(callback, weights, replaced)
        if fits:
            callback._average_model = own.new_average(device, on_parts)
        if isinstance(getattr(callback._average_model, "module", callback._average_model), HeldTensors):
            averages = isinstance(callback, WeightAveraging)
            for name in _OF_AVERAGES if averages else _OF_SWA:
                method = getattr(own, name.removeprefix("_"))
                method = method if on_parts is None else on_parts(method)
                if averages:
                    _Below(callback, name, method, replaced)
                else:  # static: a subclass's formula gets other arguments
                    replaced.call(callback, name, method)


class _Below(Replacement):
    """Stands for a method of one callback: runs it as its class has it, with a function in place of Lightning's.

    A subclass that overrides the method calls Lightning's by ``super()`` or by its class. Both look in Lightning's own
    class, so that is where the function stands during the call, for this callback alone.

    Args:
        callback: whose method it is.
        name: of the method.
        function: takes what Lightning's method takes.
        replaced: takes back what is replaced for the callback.
    """

    def __init__(self, callback: Any, name: str, function: Callable[..., Any], replaced: Replacements) -> None:
        super().__init__(callback, name)
        self.__wrapped__ = own_method(callback, name)  # whose code is the hook's
        self.replaced, self._callback, self._name, self._function = replaced, callback, name, function
        replaced.put(callback, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method."""
        kind: Any = WeightAveraging if isinstance(self._callback, WeightAveraging) else StochasticWeightAveraging
        lightnings = getattr(kind, self._name)

        def below(callback: Any, *args: Any, **kwargs: Any) -> Any:
            return (self._function if callback is self._callback else partial(lightnings, callback))(*args, **kwargs)

        with Replacements() as replaced:
            replaced.put(kind, self._name, below)
            return getattr(type(self._callback), self._name)(self._callback, *args, **kwargs)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for Lightning's ``setup``, which copies the module."""


class _Own:
    """Actions of one callback on its average and on the weights in use; named as its methods are."""

    def __init__(self, callback: Any, weights: ModelState, replaced: Replacements) -> None:
        self._callback, self._weights, self._replaced = callback, weights, replaced
        self.names = [name for name, _ in weights.module.named_parameters(remove_duplicate=False)]

    def live(self) -> HeldTensors:
        """The weights in use, not copied."""
        return HeldTensors(self._weights.stored_once(), self.names)

    def new_average(self, device: torch.device, on_parts: OnParts) -> Any:
        """A new average, equal to the current weights; on the callback's device if it has one, else on ``device``."""
        callback = self._callback
        if not isinstance(callback, WeightAveraging):
            return copy.deepcopy(self.live())
        options = {"use_buffers": callback._use_buffers, **callback._kwargs}
        average = AveragedModel(self.live(), callback._device or device, **options)
        update: Callable[..., Any] = partial(self.update, average)
        self._replaced.call(average, "update_parameters", update if on_parts is None else on_parts(update))
        return average

    def update(self, average: AveragedModel, module: nn.Module) -> None:
        """``AveragedModel.update_parameters`` with the weights in use."""
        type(average).update_parameters(average, self.live())

    @torch.no_grad()
    def swap_models(self, module: nn.Module) -> None:
        """Exchange the average and the current weights."""
        average = self._callback._average_model.module
        before = copy.deepcopy(self.live()).pieces()
        self._weights.load(average.pieces())
        average.fill(before)

    def copy_average_to_current(self, module: nn.Module) -> None:
        """Replace the current weights by the average."""
        self._weights.load(self._callback._average_model.module.pieces())

    def on_load_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Lightning's method without its load of the module's weights, which the strategy loads."""
        current = checkpoint.get("current_model_state")
        given = checkpoint if current is None else {**checkpoint, "current_model_state": module.state_dict()}
        _LIGHTNINGS_LOAD(self._callback, trainer, module, given)
        if current is not None:
            self._weights.load(current)

    def update_parameters(self, average: HeldTensors, module: nn.Module, n_averaged: Tensor, avg_fn: Any) -> None:
        """``StochasticWeightAveraging.update_parameters`` with the weights in use."""
        self._formula("update_parameters")(average, self.live(), n_averaged, avg_fn)

    def transfer_weights(self, average: HeldTensors, module: nn.Module) -> None:
        """The averaged parameters become those in use; buffers stay."""
        own, live = set(self.names), copy.deepcopy(self.live())
        self._formula("transfer_weights")(average, live)
        self._weights.load({name: pieces for name, pieces in live.pieces().items() if name in own})

    def _formula(self, name: str) -> Any:
        """The callback's method: Lightning's static one, or that of a subclass, which may be bound."""
        kind = type(self._callback)
        return inspect.getattr_static(kind, name).__get__(self._callback, kind)
