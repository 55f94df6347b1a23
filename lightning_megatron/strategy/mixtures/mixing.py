"""Whether the loss of a mixture of experts is one of the whole batch, seen by its routers' gradients.

A balancing loss is a product of means over all tokens, with a small factor: of the loss it changes the sixth digit, but
of a router's gradient a tenth. So the losses of parts tell nothing about it in float32, and gradients do::

    two parts at once         ∂L/∂router = g       g = a·g₁ + b·g₂     a mean over samples or targets, a sum
    each of them by itself    g₁ and g₂            anything else       samples are mixed

The three runs are forwards and backwards through the pipeline, with the same random numbers for the same samples; their
gradients are thrown away, and what the step logs and writes is put back. It is done in the first step, and in steps 8,
64, 512, ..., as a loss may begin late.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_megatron.experts.balance.added import AddedLosses
from lightning_megatron.experts.balance.balancing import BalancingLosses, KeptLogits, balances, collect_once
from lightning_megatron.experts.balance.bias import OwnBiases
from lightning_megatron.experts.balance.capacities import Capacities
from lightning_megatron.experts.balance.whole_batch import WholeBatchMixtures, drops_tokens
from lightning_megatron.experts.routers import mixtures_of, routers_of
from lightning_megatron.mesh.batches import batch_size_of, map_tensors, samples_of
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.torch_functions import Run
from lightning_megatron.strategy.data.joined_batches import joined_batches
from lightning_megatron.strategy.lightning.samplers import deals_in_turns
from lightning_megatron.strategy.loss.over_replicas import SeesGroup
from lightning_megatron.strategy.loss.trials.gradient_trials import GradientTrial, tolerance
from lightning_megatron.strategy.mixtures.counts_first import CountsFirst
from lightning_megatron.strategy.recheck import is_due
from lightning_megatron.strategy.step.step_context import StepContext

_AGAIN = 8  # factor between the steps in which it is tried
_MOST = 8  # samples in each part
_SMALL = 1e-3  # times the largest router's gradient: below it there is nothing but rounding
_ROUNDING = 4 * torch.finfo(torch.float32).eps  # of a loss: many models weigh experts in 32 bits, whatever the dtype


class _Found(NamedTuple):
    """Findings of a trial.

    Attributes:
        router: name of one whose gradient is of the whole batch, or "".
        moves: by how much the loss may change with the routers, at most: ∑ |∂L/∂w|·|w|.
        loss: the largest of the pieces; 0 on stages that compute none.
        gathers: whether the step gathers over the replicas.
        keeps_counts: whether layers keep counts for a bias.
        balanced: whether there are balancing losses beside, that are known.
    """

    router: str
    moves: float
    loss: float
    gathers: bool
    keeps_counts: bool
    balanced: bool


class MixingTrials:
    """Tries whether a mixture's loss mixes samples.

    Args:
        context: what steps run on.

    Attributes:
        added: balancing losses that the run adds to the step's; ``None`` for none.
        counts: passes of counts before steps in micro-batches, where balancing losses are known.
    """

    def __init__(self, context: StepContext) -> None:
        module, mesh, options = context.module, context.mesh, context.options
        self._context, self._module, self._mesh, self._device = context, module, mesh, context.device
        self._replicas, self._experts = mesh.layout.data, options.gradients.experts
        cuts = mesh.layout.pipeline > 1 or options.micro_batch_size != "auto"
        self._cuts = cuts and options.whole_batch_loss == "auto" and options.loss_weight is None
        wanted = self._cuts or (self._replicas > 1 and options.expert_balance is None)
        wanted = wanted and module.automatic_optimization
        self._routers = routers_of(module) if wanted else {}
        self._has_routers = bool(self._routers)  # on any stage: one without has to take part
        if wanted and mesh.layout.pipeline > 1:
            self._has_routers = any(objects.gather(self._has_routers, mesh.group("pipeline_parallel")))
        self._balance = options.expert_balance
        alone = self._replicas == 1 or self._balance is not None
        group = None if alone else mesh.group("data_parallel")
        self.added = AddedLosses(module, options.added_balance) if options.added_balance is not None else None
        collect_once(module)
        in_step, in_turns = lambda: context.recording.recorder is not None, lambda: deals_in_turns(module)
        self._own = WholeBatchMixtures(module, group, in_step, in_turns)
        self._known = BalancingLosses(module, group, in_step), self._own
        here = any(known.here for known in self._known) and not drops_tokens(module)
        may_count = bool(here and wanted and self._cuts and mesh.layout.context == 1)
        self.counts = CountsFirst(context, self._known, group, may=may_count)
        self._kept = KeptLogits(module) if mesh.layout.pipeline > 1 else None
        self._keeps_whole = self._cuts and (bool(balances(module)) or drops_tokens(module))
        if cuts and not self._cuts and drops_tokens(module):
            raise ValueError(
                "`MoE(capacity_factor=...)` drops tokens by their place in the whole batch, so the batch cannot run in "
                "micro-batches: leave `whole_batch_loss` at 'auto' and `micro_batch_loss_weight` out, or use "
                "`capacity_factor=None`."
            )
        self._biases, self._keep_counts = OwnBiases(module), False
        self._capacities = Capacities(mixtures_of(module) if self._has_routers else ())
        self._checks = self._replicas > 1 and self._balance is None
        if self._checks:
            self._checks = any(objects.gather(self._biases.some, mesh.group("world")))
        self._steps, self._next = 0, 1.0
        self._found = False

    def mixes(
        self,
        call: Callable[[Any], Any],
        batch: Any,
        parts: Sequence[Any],
        *,
        first: bool,
        weights: Sequence[float] = (),
    ) -> bool:
        """Whether this batch is the one that has shown that samples are mixed. Collective over the world.

        Args:
            call: the user's step, taking a (micro-)batch.
            batch: equal on all stages of a replica.
            parts: its micro-batches; one if it is not cut.
            first: whether no gradients have been collected for the next update.
            weights: what they count in the mean of the batch; nothing where it stays whole anyhow.

        Raises:
            ValueError: experts are shared out over replicas, each of which would have a loss of its own.
        """
        self._steps += 1
        if self._checks and is_due(self._steps, first=_AGAIN):
            self._biases.check(self._mesh.group("world"))
        keeps, self._keeps_whole = self._keeps_whole, False
        found = self._tries(call, batch, parts, weights, first=first) or (keeps and not self.counts.used)
        whole = self._own.here and (found or self._found or len(parts) == 1)
        self._own.samples = batch_size_of(batch) if whole else None
        return found

    @property
    def has_routers(self) -> bool:
        """Whether there are mixtures of experts on any rank."""
        return self._has_routers

    def begin(self) -> None:
        """Called at the start of a batch, before anything is tried."""
        self._own.samples = None

    def retry(self) -> None:
        """Called where a phase of training begins, in which another loss may be computed: the step is tried."""
        if math.isfinite(self._next):
            self._next = 0.0

    def _tries(
        self,
        call: Callable[[Any], Any],
        batch: Any,
        parts: Sequence[Any],
        weights: Sequence[float],
        *,
        first: bool,
    ) -> bool:
        if self._found or not self._has_routers or self._steps < self._next or not first:
            return False
        pieces = _pieces(batch, parts) if len(parts) > 1 or self._mesh.layout.pipeline == 1 else []
        world = self._mesh.group("world")
        if not all(objects.gather(bool(pieces), world)):
            pieces = self._borrowed(batch) if self._mesh.layout.pipeline == 1 and not self._cuts else []
            if not all(objects.gather(bool(pieces), world)):
                return False  # tried again with the next batch
        own_clearing = is_overridden("optimizer_zero_grad", self._module)
        self._next = math.inf if own_clearing else self._steps * _AGAIN
        sees = _Sees(self._mesh.group("data_parallel") if self._replicas > 1 else None, self._routers.values())
        told = objects.gather(
            (self._try(call, pieces, sees), bool(weights) and self.counts.may, self._capacities.some), world
        )
        tried = [found for found, *_ in told if found is not None]
        if len(tried) < len(told):  # nothing is known
            return False
        router = _mixed_on_some(tried)
        if not router and any(some for *_, some in told):
            with self._capacities.lowered():
                full = objects.gather(self._try(call, pieces, sees, full=True), world)
            router = _mixed_on_some([found for found in full if found is not None])
        self._found = bool(router)
        if router:
            self._say(router, gathers=any(each.gathers for each in tried))
        balanced, keeps = any(each.balanced for each in tried), any(each.keeps_counts for each in tried)
        may = balanced and not (keeps or self._found) and all(may for _, may, _ in told)
        self.counts.used = may and self._counts_exactly(call, pieces, weights[:2], sees)
        self.counts.forget()
        return self._found or keeps or (balanced and not self.counts.used)

    def _counts_exactly(
        self, call: Callable[[Any], Any], pieces: list[Any], weights: Sequence[float], sees: _Sees
    ) -> bool:
        """Whether micro-batches with a pass of counts before them are the whole batch, on all ranks."""
        within = tolerance(self._device, {p.dtype for p in self._routers.values()} | sees.dtypes)
        exact = self.counts.is_exact(call, pieces, weights, self._routers, sees, within)
        exact = all(objects.gather(exact, self._mesh.group("world")))
        if exact:
            self.counts.say()
        return exact

    def _borrowed(self, batch: Any) -> list[Any]:
        """Batches of two replicas, and both at once, on all of them; nothing, if they differ in shape."""
        if self._replicas == 1 or batch_size_of(batch) > _MOST:
            return []
        told = objects.gather(map_tensors(batch, Tensor.cpu), self._mesh.group("data_parallel"))[:2]
        one, other = (map_tensors(each, lambda tensor: tensor.to(self._device)) for each in told)
        both = joined_batches(one, other)
        return [] if both is None else [one, other, both]

    def close(self) -> None:
        """Give back what was replaced in models."""
        for known in self._known:
            known.close()
        if self.added is not None:
            self.added.close()
        if self._kept is not None:
            self._kept.close()

    def _say(self, router: str, *, gathers: bool) -> None:
        what = (
            f"the gradient of `{router}` for a batch is no combination of its gradients for two parts of the batch: "
            "the loss holds something of the whole batch, such as a balancing loss, or experts have a capacity for it"
        )
        if self._cuts:
            rank_zero_info(f"{what}. So that the step is that of one process, each batch runs whole.")
        if self._replicas == 1 or self._balance is not None or gathers:
            return
        ways = (
            "`expert_balance='replica'` says that each replica's own is meant, as in DDP; for that of the whole batch "
            "compute it from what `self.all_gather(router_logits, sync_grads=True)` gives"
        )
        over = f"over `data_parallel_size={self._replicas}` replicas that is not what one process computes"
        raise ValueError(f"{what}; {over}. {ways}.")

    def _looking(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The user's step, after which what layers have kept is looked at."""

        def look(piece: Any) -> Any:
            try:
                return call(piece)
            finally:  # a stage ends its run by raising
                self._keep_counts |= self._biases.keep_counts()

        return look

    def _try(self, call: Callable[[Any], Any], pieces: list[Any], sees: _Sees, *, full: bool = False) -> _Found | None:
        """Findings of a trial of two parts of a batch, and of both at once; ``None`` where it could not run.

        Args:
            call: the user's step.
            pieces: the parts, and both.
            sees: what the step does.
            full: whether experts are full after few tokens, so that the first part may leave no place to the second.
        """
        alone = self._mesh.layout.world_size == self._replicas and self._experts == 1
        for known in self._known:
            known.called = False
        trial = GradientTrial(self._context, self._routers, around=sees, may_fail=alone, at=self.counts.at)
        with self.counts.noting(2):
            found = trial.run(self._looking(call), pieces, [1.0, 1.0, 1.0])
        if trial.failed:
            return None
        sees.dtypes |= trial.dtypes
        within = tolerance(self._device, {parameter.dtype for parameter in self._routers.values()} | sees.dtypes)
        router = mixed(found[2], found[0], found[1], within, both=full)
        moves = sum(float(grad.norm() * self._routers[name].detach().norm()) for name, grad in found[2].items())
        called = any(known.called for known in self._known)
        return _Found(router, moves, trial.loss, sees.gathers, self._keep_counts, called)


def mixed(
    whole: Mapping[str, Tensor],
    one: Mapping[str, Tensor],
    other: Mapping[str, Tensor],
    tolerance: float,
    *,
    both: bool = False,
) -> str:
    """The first parameter whose gradient of a batch is no combination of those of its parts, if it is so for most.

    Args:
        whole: gradients of the batch by name.
        one: those of its first part.
        other: and of its second.
        tolerance: relative.
        both: whether each part that has gradients has to be in the combination.
    """
    names = [name for name in whole if name in one and name in other]
    if not names:
        return ""
    columns = [torch.cat([each[name].double().flatten() for name in names]) for each in (one, other)]
    parts, together = torch.stack(columns, 1), torch.cat([whole[name].double().flatten() for name in names])
    factors = torch.linalg.pinv(parts.mT @ parts) @ (parts.mT @ together)
    norms = {name: float(whole[name].double().norm()) for name in names}
    least, far = _SMALL * max(norms.values()), []
    counted = [name for name in names if norms[name] > least]
    if both and counted and float(parts.norm(dim=0).min()) > 0 and float(factors.abs().min()) < tolerance:
        return counted[0]
    for name in counted:
        rest = whole[name].double() - factors[0] * one[name].double() - factors[1] * other[name].double()
        if float(rest.norm()) > tolerance * norms[name]:
            far.append(name)
    return far[0] if far and 2 * len(far) >= len(counted) else ""


def _mixed_on_some(tried: Sequence[_Found]) -> str:
    """A router that some rank has found to mix samples, by more than rounding; "" if there is none."""
    least = _ROUNDING * max((each.loss for each in tried), default=0.0)  # experts that weigh 1 teach a router nothing
    return next((each.router for each in tried if each.router and each.moves > least), "")


def _pieces(batch: Any, parts: Sequence[Any]) -> list[Any]:
    """Two parts of a batch and both at once; nothing, if it has one sample."""
    if len(parts) > 1:
        return [parts[0], parts[1], samples_of(batch, 0, batch_size_of(parts[0]) + batch_size_of(parts[1]))]
    half = min(batch_size_of(batch) // 2, _MOST)
    return [samples_of(batch, *ends) for ends in ((0, half), (half, 2 * half), (0, 2 * half))] if half else []


class _Sees(SeesGroup):
    """Sees also in which dtypes the step computes with routers: many of Hugging Face's do so in 32 bits, whatever the
    others do.

    Args:
        group: the replicas; ``None`` for one.
        routers: their parameters.

    Attributes:
        dtypes: to which it has converted routers.
    """

    def __init__(self, group: dist.ProcessGroup | None, routers: Iterable[Tensor]) -> None:
        super().__init__(group)
        self._routers = {parameter.data_ptr() for parameter in routers}
        self.dtypes: set[torch.dtype] = {torch.float64}

    def seen(self, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of an operator."""
        if func is torch.ops.aten._to_copy.default and _address(args[0]) in self._routers:
            self.dtypes.add(kwargs.get("dtype") or args[0].dtype)
        return super().seen(run, func, args, kwargs)


def _address(tensor: Tensor) -> int:
    return 0 if isinstance(tensor, FakeTensor) or tensor.is_meta else tensor.data_ptr()
