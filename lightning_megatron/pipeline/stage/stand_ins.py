"""Stand-ins for the results of calls that a stage does not compute, in the form told by the stage that does.

Where nothing is told, because the step runs on a whole batch whose micro-batches alone have gone through the layers, or
because a call returns objects of a class of its own, the forward is run without its numbers
(:mod:`~lightning_megatron.pipeline.elsewhere.abstract`).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.pipeline.elsewhere.provenance import Provenance
from lightning_megatron.pipeline.elsewhere.standin import OutputShapes, first_tensor, shape_and_dtype
from lightning_megatron.pipeline.stage.boundary import Boundary
from lightning_megatron.pipeline.stage.calls import LayerCall, PartCall
from lightning_megatron.pipeline.stage.forms import Forms, filled, form_of
from lightning_megatron.pipeline.stage.trunk_output import JoinedBoundary

_NOTHING = nullcontext()


class StandIns:
    """Makes stand-ins for outputs that other stages compute, and notes the outputs that are computed here.

    Args:
        device: where this rank computes.

    Attributes:
        told: by the stages before, of the present run; ``None`` where nothing is.
        noted: what the calls of the present run have given here.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shapes = OutputShapes()
        self.told: Forms | None = None
        self.noted = Forms()
        self._calls: dict[int, int] = {}
        self._joined: JoinedBoundary | None = None
        self._tracer: Provenance | None = None  # calls outside of a step may come before any run has begun

    def begin(self, received: Boundary, tracer: Provenance | None) -> None:
        """Prepare for a run.

        Args:
            received: what the stage before sent.
            tracer: follows the step's values, in the first run of its kind.
        """
        self.told, self.noted, self._calls = received.forms, Forms(), {}
        self._joined = received if isinstance(received, JoinedBoundary) else None
        self._tracer = tracer

    def all_forms(self) -> Forms:
        """Forms of the results of all calls so far, here and on the stages before."""
        return self.noted if self.told is None else self.told.with_later(self.noted)

    def number(self, index: int) -> tuple[int, int]:
        """Name of the next call of part ``index``, or of the next one inside of layer ``index``."""
        count = self._calls[index] = self._calls.get(index, 0) + 1
        return index, count

    def keeps(self, index: int, call: LayerCall, x: Any) -> bool:
        """Whether layer ``index``, called with ``x`` alone, returns one tensor like it; noted where nothing is told."""
        if self.told is None or index not in self.told.layers:
            kept = self._joined is None and self._shapes.keeps(call.module, x)
            if kept:
                note(self.noted.layers, index, x)
            return kept
        form = self.told.layers[index]
        return form is not None and form[:2] == shape_and_dtype(x)

    def of_layer(self, place: Any, call: LayerCall, args: Any, kwargs: Any, *, reuse: bool) -> Any:
        """The output of layer ``place``, or of a call inside of it.

        Args:
            place: its number, or name of the call.
            call: asks.
            args: of the call.
            kwargs: the same, by name.
            reuse: let a tensor like the first of the arguments be that one; a stand-in, the caller vouches.
        """
        form = None if self.told is None else self.told.layers.get(place)
        if form is None:
            output = self._abstract(call, args, kwargs, reuse)
            self.noted.layers[place] = form_of(output)
            if self._joined is None or self._joined.agrees(place, form_of(output)):
                return output
            return self._again(self._joined, place, call, args, kwargs)
        first = first_tensor(args, kwargs) if reuse else None
        return self._filled(form, call, first)

    def of_part(self, call: PartCall, args: Any, kwargs: Any) -> Any:
        """Result of a part outside of the trunk."""
        place = self.number(call.index)
        form = None if self.told is None else self.told.parts.get(place)
        if form is None:
            return note(self.noted.parts, place, self._abstract(call, args, kwargs, False))
        return self._filled(form, call, None)

    def _filled(self, form: Any, call: LayerCall | PartCall, first: Tensor | None) -> Any:
        """Stand-ins in a form; ``first`` in the place of one like it."""
        sentinel = call.sentinel
        if self._tracer is None:
            return filled(form, self._device, lambda shape, dtype, at: sentinel.stand_in(shape, dtype, at, first))
        with self._tracer.paused():
            return filled(form, self._device, lambda shape, dtype, at: sentinel.stand_in(shape, dtype, at, first))

    def _abstract(self, call: LayerCall | PartCall, args: Any, kwargs: Any, reuse: bool) -> Any:
        with self._untraced():
            return self._shapes.stand_in(call.module, call.sentinel, call.runs, args, kwargs, reuse=reuse)

    def _untraced(self) -> Any:
        return _NOTHING if self._tracer is None else self._tracer.paused()

    def _again(self, joined: JoinedBoundary, place: Any, call: LayerCall, args: Any, kwargs: Any) -> Any:
        """Stand-in for a layer's output for a whole batch, where the known one is not like what it gave for the
        micro-batches: hooks may have changed the layer.

        Raises:
            RuntimeError: the layer's forward would not give anything else now.
        """
        self._shapes.forget(call.module)
        output = self._abstract(call, args, kwargs, False)
        if joined.agrees(place, form_of(output)):
            return output
        raise RuntimeError(
            f"layer `{call.sentinel.name}` gives tensors of other shapes for micro-batches than it would give for the "
            "whole batch: it chooses them by its data. Let it pad to one shape, return the lengths as a tensor, or set "
            "`micro_batch_size` to the batch size."
        )


def note(into: dict[Any, Any], place: Any, output: Any) -> Any:
    """Note the form of what a call has given; at once for the usual one, a tensor. Returns ``output``."""
    if type(output) is Tensor:
        into[place] = tuple(output.shape), output.dtype, output.is_cpu
    else:
        into[place] = form_of(output)
    return output
