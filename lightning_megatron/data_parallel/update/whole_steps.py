"""Lets an optimizer that needs all parameters together step on whole ones, on every rank of a tensor group.

LBFGS takes inner products over the whole gradient, SAM (Foret et al., arXiv 2010.01412) its norm, and both call their
closure again with other weights. So every tensor-parallel rank runs the user's optimizer on whole parameters, which
take the place of the split ones in its groups except while the closure runs::

    optimizer.step(closure)
        slices ──all-gather──▶ wholes            the optimizer's own code: d = -H g, w + t d, ...
        closure()
            wholes ──cut──▶ slices               forward, backward, sums over ranks, clipping: on slices
            slices ──all-gather──▶ wholes        weights and gradients
        the optimizer's own code
        wholes ──cut──▶ slices

All ranks of the group compute the same from the same numbers: gradients of what each has whole, and the closure's loss,
are those of its first rank. The optimizer's state is of whole parameters, and is saved as in one process. It costs each
rank the memory of the unsplit optimizer, and of weights and gradients while it steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.data_parallel.update.step_hooks import StepHooks, carry_marks
from lightning_megatron.layers.whole.parameter_parts import ParameterParts, gathered
from lightning_megatron.mesh.messages.collectives import raw_broadcast


class WholeSteps(StepHooks):
    """Makes one optimizer step on whole parameters, by hooks around its ``step`` and ``state_dict``.

    Between steps its groups hold the module's parameters. The lists in its groups stay the objects that they are, as an
    optimizer may refer to them. Not to be used with replicas that share the optimizer's work.

    Args:
        optimizer: as ``configure_optimizers`` returned it.
        group: the tensor group.
        parts_of: parameter -> its parts over the tensor group; ``None`` if every rank has all of it.
    """

    def __init__(
        self, optimizer: Optimizer, group: dist.ProcessGroup, parts_of: Callable[[nn.Parameter], ParameterParts | None]
    ) -> None:
        super().__init__(optimizer)
        self._group, self._parts_of = group, parts_of
        self._wholes: dict[int, tuple[ParameterParts, nn.Parameter]] = {}
        self._versions: list[int] = []

    def skip(self) -> None:
        """Refused when a run begins: a step that calls its closure again cannot be left out in its middle."""
        raise RuntimeError("an optimizer that needs all parameters together cannot skip an update")

    def restore(self) -> None:
        """Put the parameters back into the groups, also after a step that failed."""
        self._steps = 0
        if self._parameters is not None:
            for group, parameters in zip(self._optimizer.param_groups, self._parameters, strict=True):
                group["params"][:] = parameters
            self._parameters = None
        for _, whole in self._wholes.values():
            whole.grad = None
            whole.data = whole.data.new_zeros(()).expand(whole.shape)

    def key_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter by which the optimizer keeps state: a whole one for one that is split."""
        found = self._whole_of(parameter)
        return parameter if found is None else found[1]

    def _whole_of(self, parameter: nn.Parameter) -> tuple[ParameterParts, nn.Parameter] | None:
        found = self._wholes.get(id(parameter))
        parts = self._parts_of(parameter) if found is None else None
        if parts is not None:
            stand_in = nn.Parameter(parameter.detach().new_zeros(()).expand(parts.shape))
            found = self._wholes[id(parameter)] = parts, stand_in
        return found

    def _split(self) -> list[tuple[nn.Parameter, ParameterParts, nn.Parameter]]:
        """Of each split parameter in the groups: itself, its parts, and the whole one in its place."""
        members = (p for group in self._members() for p in group)
        return [(p, *found) for p in members if (found := self._whole_of(p)) is not None]

    def _begin(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        self._enter()
        return None if closure is None else _OutsideClosure(closure, self)

    def _finish(self) -> None:
        self._leave()
        self.restore()

    def _keys(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return ((parameter, whole) for parameter, _, whole in self._split())

    @torch.no_grad()
    def _enter(self) -> None:
        """Put whole parameters into the groups, with the weights and gradients of the slices."""
        split = self._split()
        trained = [(parts, p.grad, whole) for p, parts, whole in split if p.grad is not None]
        sent = [(parts, p.detach()) for p, parts, _ in split] + [(parts, grad) for parts, grad, _ in trained]
        values = gathered(sent)
        for (_, _, whole), value in zip(split, values, strict=False):
            whole.data, whole.grad = value, None
        for (_, _, whole), value in zip(trained, values[len(split) :], strict=True):
            whole.grad = value
        own = {id(p) for p, *_ in split}
        members = (p for group in self._members() for p in group)
        self._take_from_first([p.grad for p in members if id(p) not in own and p.grad is not None])
        self._cut_no_state(split)
        self._parameters = [list(group["params"]) for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            stand_ins = [self.key_of(parameter) for parameter in group["params"]]
            carry_marks(group["params"], stand_ins)
            group["params"][:] = stand_ins
        self._versions = [p._version for p, *_ in split]

    @torch.no_grad()
    def _leave(self) -> None:
        """Put the module's parameters back into the groups, with their slices of the whole weights.

        Raises:
            RuntimeError: the optimizer has changed slices instead of what was in its groups.
        """
        split = self._split()
        if self._versions != [p._version for p, *_ in split]:
            raise RuntimeError(
                f"`{type(self._optimizer).__name__}.step` has changed parameters that were not in its `param_groups`: "
                "over tensor-parallel ranks these hold whole parameters while it steps, as it needs all of them "
                "together. Let it go through `self.param_groups`, or use `tensor_parallel_size=1`."
            )
        for parameter, parts, whole in split:
            for box in parts.spec.boxes:  # padding keeps its values
                box.of_local(parameter.data).copy_(box.of_full(whole))
        for group, parameters in zip(self._optimizer.param_groups, self._parameters or [], strict=True):
            group["params"][:] = parameters
        self._parameters = None

    def _take_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Let tensors that every rank has be those of the first rank of the group, bit for bit."""
        source = dist.get_global_rank(self._group, 0)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            chosen = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in chosen])
            raw_broadcast(flat, source, self._group)
            for tensor, values in zip(chosen, flat.split([tensor.numel() for tensor in chosen]), strict=True):
                tensor.copy_(values.view(tensor.shape))

    def _cut_no_state(self, split: Sequence[tuple[nn.Parameter, ParameterParts, nn.Parameter]]) -> None:
        """Key state of split parameters, such as loaded step counts, by the whole ones.

        Raises:
            RuntimeError: the optimizer made state for a slice.
        """
        state = self._optimizer.state
        for parameter, parts, whole in split:
            if parameter not in state:
                continue
            values = state.pop(parameter)
            if any(isinstance(v, Tensor) and v.dim() and v.shape == parameter.shape for v in values.values()):
                raise RuntimeError(
                    f"the optimizer made state for a slice of shape {tuple(parameter.shape)} of `{parts.name}`, which "
                    f"has the shape {parts.shape} and which it needs whole; make state in `step`, or use "
                    "`tensor_parallel_size=1`."
                )
            state[whole] = values


class _OutsideClosure:
    """Runs the user's closure on the module's own parameters, in the middle of a step on whole ones."""

    def __init__(self, closure: Callable[[], Any], update: WholeSteps) -> None:
        self._closure, self._update = closure, update

    def __call__(self) -> Any:
        self._update._leave()
        with torch.enable_grad():
            result = self._closure()
        self._update._enter()
        if isinstance(result, Tensor) and result.numel() == 1:
            result = result.detach().clone()
            self._update._take_from_first([result])
        return result
