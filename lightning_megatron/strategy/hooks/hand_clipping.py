"""``torch.nn.utils.clip_grad_norm_`` in a user's hook, where no rank holds all gradients.

A norm over ``self.parameters()`` would be that of one stage, or of slices. While a run lasts, the norms that torch
takes of gradients come here, and are those of one process or an error::

    all gradients of the model                               norm over the whole model
    any others, in a hook that goes over all stages          torch's own: norms of each gradient meet
    elsewhere those of one layer, or of one other part       norm here, where all of it is
    elsewhere none                                           absent: another stage may have it
    anything else                                            refused: it may go on on other stages

In a hook that sees split gradients whole, a part of the model is all here for tensor parallelism. What is scaled is
what is here, on every stage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from lightning_megatron.layers.whole.step_kinds import part_shown
from lightning_megatron.mesh.replaced import Replacements
from lightning_megatron.pipeline.elsewhere.absent import Absent, make_absent
from lightning_megatron.pipeline.elsewhere.away import StageSource
from lightning_megatron.pipeline.elsewhere.presence import Presence
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.strategy.hooks.over_stages import OverStages
from lightning_megatron.strategy.hooks.whole_hooks import WholeHooks

_NAME, _SCALE, _GROUP = "_get_total_norm", "_clip_grads_with_norm_", "_group_tensors_by_device_and_dtype"
_ELSEWHERE = StageSource(
    "a norm of gradients",
    way_out="Take that norm in the hook `on_before_optimizer_step`, which logs what the stage with the gradients has, "
    "or use `pipeline_parallel_size=1`.",
)


class HandClipping:
    """Stands for torch's norm of gradients.

    Args:
        module: the user's module, divided.
        presence: what of it is on this rank.
        stage: knows whether all that is here was read; ``None`` with one stage.
        norm: gives the 2-norm over the whole model of the gradients of some of this rank's parameters; collective.
        whole_hooks: shows split gradients whole to hooks, where there are any.
        over_stages: gives hooks the parameters of all stages, where there are several.
    """

    def __init__(
        self,
        module: nn.Module,
        presence: Presence,
        stage: Stage | None,
        norm: Callable[[Iterable[nn.Parameter]], Tensor],
        whole_hooks: WholeHooks | None,
        over_stages: OverStages | None,
    ) -> None:
        self._module, self._presence, self._stage = module, presence, stage
        locals_of = (each.local for each in (over_stages, whole_hooks) if each is not None)
        self._locals: tuple[Callable[[Any], Any], ...] = tuple(locals_of)
        self._norm = self._local(norm)
        self._whole_hooks, self._over_stages = whole_hooks, over_stages
        self._original: Any = getattr(clip_grad, _NAME)
        self._replaced = Replacements()

    def start(self) -> None:
        """Take the place of torch's function."""
        self._original = getattr(clip_grad, _NAME)
        if self._locals:  # scaling treats every element alike, wherever it is
            self._replaced.put(clip_grad, _SCALE, self._scaling(getattr(clip_grad, _SCALE)))
        if self._stage is not None:
            self._replaced.put(clip_grad, _GROUP, _grouping_none(getattr(clip_grad, _GROUP)))
        self._replaced.put(clip_grad, _NAME, self)
        self._replaced.put(torch.nn.utils, "get_total_norm", self)

    def stop(self) -> None:
        """Give it back."""
        self._replaced.take_back()

    def __call__(
        self, tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        over_stages = None if self._over_stages is None else self._over_stages.running
        own = [tensor for tensor in tensors if type(tensor) is not Absent]
        owners = self._owners()
        held = [part_shown(tensor) for tensor in own]
        given = [owners[id(tensor)] for tensor in held if id(tensor) in owners]
        names = [name for name, _ in given]
        two = float(norm_type) == 2.0
        all_here = len(given) == len(owners)
        if over_stages is None:
            together = two and self._is_for_all(all_here)
        else:
            together = two and over_stages.are_all_gradients(tensors, all_here)
        slices = self._whole_hooks is not None and self._whole_hooks.view.is_whole and not together
        if over_stages is not None and not together:
            return self._original(tensors, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
        if not own and self._stage is not None:
            return make_absent(torch.tensor(0.0), _ELSEWHERE.name, self._stage.phase, _ELSEWHERE)
        if len(given) < len(own) or not given or self._presence.are_whole_here(names, slices=slices):
            return self._original(own, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
        if not together:
            raise RuntimeError(
                f"a norm (order {norm_type:g}) of {len(given)} gradients was taken by `clip_grad_norm_` or "
                f"`get_total_norm`, from `{names[0]}` to `{names[-1]}`, but this rank holds only a part of the model: "
                "other ranks may have more of them. Clip with `self.clip_gradients(optimizer, gradient_clip_val=..., "
                "gradient_clip_algorithm='norm')` in `configure_gradient_clipping`, or with "
                "`Trainer(gradient_clip_val=...)`; for the number alone use `self.trainer.strategy.gradient_norm()`."
            )
        total = self._norm([parameter for _, parameter in given]).to(own[0].device, own[0].dtype)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(f"the total norm of the gradients is {float(total)}, so they cannot be clipped.")
        return total

    def _local(self, function: Any) -> Any:
        """``function``, over what this rank has."""
        for local in self._locals:
            function = local(function)
        return function

    def _scaling(self, scale: Callable[..., None]) -> Callable[..., None]:
        """Torch's scaling of gradients, of what is here: other stages do it to what they have."""
        scale_own = self._local(scale)

        @functools.wraps(scale)
        def scaling(parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any) -> None:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if self._over_stages is not None and self._over_stages.running is not None:
                total_norm = self._over_stages.running.known(total_norm, parameters)
            own = [parameter for parameter in parameters if type(parameter) is not Absent]
            scale_own(own, max_norm, total_norm, *args, **kwargs)

        return scaling

    def _owners(self) -> dict[int, tuple[str, nn.Parameter]]:
        """Name and parameter of each gradient of this rank."""
        with nullcontext() if self._whole_hooks is None else self._whole_hooks.steps.paused():
            named = type(self._module).named_parameters(self._module)
            return {id(p.grad): (name, p) for name, p in named if p.grad is not None}

    def _is_for_all(self, complete: bool) -> bool:
        """Whether every rank takes this norm together, of all its gradients."""
        return self._stage is None or (complete and self._stage.cursor.parameters_read)


def _grouping_none(group: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's grouping of gradients, which knows no group of none: what a stage has of other stages' layers."""

    @functools.wraps(group)
    def grouping(lists: Any, *args: Any, **kwargs: Any) -> Any:
        return group(lists, *args, **kwargs) if lists[0] else {}

    return grouping
