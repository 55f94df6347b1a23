"""Runs the user's own optimizer on this rank's pieces of the parameters, which replace them only during its step.

Between steps the optimizer's groups hold the module's parameters, so ``zero_grad``, ``toggle_optimizer``, learning-rate
schedulers, ``add_param_group`` and the user's own loops over ``param_groups`` work as usual. Once the closure has run,
each parameter in the groups is replaced by this rank's piece of it. After the update the parameters are put back, and
the updated weights are all-gathered::

    optimizer.step(closure)
        closure()                       gradients are summed; hooks and clipping run
        groups: parameters -> pieces
        the update, on pieces
        groups: pieces -> parameters
        weights: every rank's shard to all

The optimizer's state is that of pieces. State for full parameters (made in the optimizer's constructor, or loaded) is
cut down to the pieces at the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.data_parallel.buckets.bucket import Bucket, Piece
from lightning_megatron.data_parallel.buckets.buckets import GradientBuckets
from lightning_megatron.data_parallel.update.hosted_steps import HostedSteps
from lightning_megatron.data_parallel.update.step_hooks import StepHooks, carry_marks
from lightning_megatron.data_parallel.update.whole_matrices import WholeMatrices
from lightning_megatron.data_parallel.windows.arriving import ArrivingWindows


class PiecewiseUpdate(StepHooks):
    """Makes one optimizer update this rank's pieces, by hooks around its ``step`` and ``state_dict``.

    Args:
        optimizer: as ``configure_optimizers`` returned it.
        buckets: hold the pieces.
        late: overlaps the all-gather of weights with the next forward; without it, the step ends after the all-gather.
        wholes: assembles matrices from the slices of tensor-parallel ranks, for an optimizer that needs whole ones.
        hosted: steps on what lies in host memory.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        buckets: GradientBuckets,
        late: ArrivingWindows | None = None,
        wholes: WholeMatrices | None = None,
        hosted: HostedSteps | None = None,
    ) -> None:
        super().__init__(optimizer)
        self._late, self._wholes, self._hosted = late, wholes, hosted
        self._buckets = buckets
        self._narrowed: list[Bucket] = []
        self._skips = False

    def skip(self) -> None:
        """Skip the update of the step under way: weights and optimizer state stay as they are."""
        self._skips = True

    def restore(self) -> None:
        """Put the parameters back into the groups, also after a step that failed."""
        self._steps = 0
        if self._parameters is not None:
            for group, parameters in zip(self._optimizer.param_groups, self._parameters, strict=True):
                group["params"] = parameters
            self._parameters = None
        if self._hosted is not None:
            self._hosted.drop()
        for bucket in self._narrowed:
            bucket.widen_gradients()
        self._narrowed = []
        if self._wholes is not None:
            self._wholes.release()

    def pieces(self) -> Iterator[tuple[nn.Parameter, Piece]]:
        """Yield each parameter of the optimizer that has a piece on this rank, and the piece."""
        for parameter in (p for group in self._members() for p in group):
            piece = self._buckets.piece_of(parameter)
            if piece is not None:
                yield parameter, piece

    def cut_state(self) -> None:
        """Cut state of full parameters down to this rank's pieces.

        Raises:
            RuntimeError: the optimizer made state for a slice of a matrix that it updates as a whole.
        """
        state = self._optimizer.state
        groups = self._members()
        held = set(map(id, state)).intersection(map(id, chain.from_iterable(groups)))
        for parameter in chain.from_iterable(groups) if held else ():
            if id(parameter) not in held:
                continue
            bucket, index = self._buckets.place_of(parameter) or (None, 0)
            if bucket is not None and bucket.weights is not None:
                values, piece = state.pop(parameter), bucket.pieces.get(index)
                key = key_of(parameter, piece, self._wholes) if piece is not None else None
                if piece is not None and key is not None:
                    state[key] = {name: _cut(value, parameter, piece, key) for name, value in values.items()}

    def _begin(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        if closure is not None:
            return _EnteringClosure(closure, self._enter)
        self._enter()
        return None

    def _enter(self) -> None:
        if self._late is not None:
            self._late.finish()
        self._buckets.adopt()
        touched = self._touched_buckets()
        for bucket in touched:
            bucket.recover_weights()
        self._narrowed = [] if self._skips else touched
        for bucket in self._narrowed:
            bucket.narrow_gradients()
        self.cut_state()
        self._parameters = [group["params"] for group in self._optimizer.param_groups]
        if self._wholes is not None and not self._skips:
            self._wholes.gather(list(self.pieces()))
        for group in self._optimizer.param_groups:
            found = [] if self._skips else [self._update_of(parameter) for parameter in group["params"]]
            if not self._skips:
                carry_marks(group["params"], found)
            group["params"] = [update for update in found if update is not None]
        if self._hosted is not None and not self._skips:
            self._hosted.begin(touched)
        for group in self._optimizer.param_groups:
            group["params"] = _Handed(group["params"])

    def _update_of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """The tensor that the optimizer updates in place of a parameter; ``None`` if another rank updates it.

        Raises:
            RuntimeError: the parameter has a gradient that was never reduced, as it was frozen when the batch began.
        """
        bucket, index = self._buckets.places.get(id(parameter), (None, 0))
        if bucket is not None:
            piece = bucket.pieces.get(index)
            if bucket.weights is None or piece is None:
                return parameter if bucket.weights is None else None
            return piece.stepped if self._wholes is None else key_of(parameter, piece, self._wholes)
        if parameter.grad is not None:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got a gradient although it was frozen when the batch "
                "began, so its gradient was not summed over the replicas; unfreeze parameters before `training_step`, "
                "or pass `optimizer_sharding=False`."
            )
        return None

    def _check_seen(self) -> None:
        """Refuse an optimizer that took the parameters out of its groups before its closure had run.

        Raises:
            RuntimeError: it has not looked at the pieces.
        """
        handed = [group["params"] for group in self._optimizer.param_groups]
        if any(handed) and not any(isinstance(each, _Handed) and each.seen for each in handed):
            raise RuntimeError(
                f"`{type(self._optimizer).__name__}.step` did not look into its parameter groups after it had called "
                "`closure`, so it updated nothing: while it steps, they hold the part of each parameter that this "
                "rank updates. Call `closure()` before the loops over `param_groups`, as torch's optimizers do, or "
                "pass `optimizer_sharding=False`."
            )

    def _finish(self) -> None:
        self._check_seen()
        if self._wholes is not None:
            self._wholes.scatter()
        if self._hosted is not None and not self._skips:
            self._hosted.finish()
        self.restore()
        skipped, self._skips = self._skips, False
        if not skipped:
            buckets = self._touched_buckets()
            if self._late is not None:
                self._late.start(buckets)
                return
            for bucket in buckets:
                bucket.start_gather()
            for bucket in buckets:
                bucket.finish_gather()

    def _keys(self) -> Iterator[tuple[nn.Parameter, nn.Parameter | None]]:
        self.cut_state()
        for parameter, piece in self.pieces():
            yield parameter, key_of(parameter, piece, self._wholes)

    def _touched_buckets(self) -> list[Bucket]:
        """Buckets in which a parameter of this optimizer got a gradient on any rank; the same list on all ranks."""
        held = set(map(id, chain.from_iterable(group["params"] for group in self._optimizer.param_groups)))
        return [
            bucket
            for bucket in self._buckets.buckets
            if not held.isdisjoint(map(id, compress(bucket.parameters, bucket.touched)))
        ]


class _Handed(list[nn.Parameter]):
    """Stands in a group of an optimizer in place of its parameters; notes whether it has been read."""

    seen = False

    def __iter__(self) -> Iterator[nn.Parameter]:
        self.seen = True
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self.seen = True
        return super().__getitem__(index)

    def __add__(self, other: Any) -> Any:
        return list(self) + other

    def __radd__(self, other: Any) -> Any:
        return other + list(self)

    def copy(self) -> list[nn.Parameter]:
        return list(self)


class _EnteringClosure:
    """Runs the user's closure, then replaces the parameters by their pieces."""

    def __init__(self, closure: Callable[[], Any], enter: Callable[[], None]) -> None:
        self._closure, self._enter = closure, enter

    def __call__(self) -> Any:
        with torch.enable_grad():
            result = self._closure()
        self._enter()
        return result


def key_of(parameter: nn.Parameter, piece: Piece, wholes: WholeMatrices | None) -> nn.Parameter | None:
    """The tensor that the optimizer updates, and keys its state by: the piece, or the whole matrix on its owner.

    Returns:
        ``None`` if another tensor rank owns the matrix.
    """
    matrix = wholes.matrix_of(parameter) if wholes is not None else None
    if matrix is None or wholes is None:
        return piece.stepped
    return matrix.update if wholes.owns(matrix) else None


def _cut(value: Any, parameter: nn.Parameter, piece: Piece, key: nn.Parameter) -> Any:
    """Cut a state value of a parameter to that of its piece; numbers and tensors of another shape stay as they are.

    Raises:
        RuntimeError: the optimizer made state for a slice of a matrix that it updates as a whole.
    """
    if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0:
        if key is not piece.stepped:
            raise RuntimeError(
                f"the optimizer made state for a slice of shape {tuple(parameter.shape)} of a matrix of shape "
                f"{tuple(key.shape)}, which it needs whole; make state in `step`, or use `tensor_parallel_size=1`."
            )
        part = value.detach().reshape(-1)[piece.part.start : piece.part.stop]
        return part.clone().view(key.shape).to(key.device)
    return value
