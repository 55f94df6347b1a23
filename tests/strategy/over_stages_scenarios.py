"""Hooks that go over all parameters: numbers made of all of them, and draws for each."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trainer_for
from tests.parity.zoo.loops import Walker
from tests.parity.zoo.tasks import TokenTask
from tests.strategy import gradient_scenarios


class Over(TokenTask):
    """A network with a weight that no step uses, and tied ones."""

    def __init__(self) -> None:
        super().__init__(Walker())
        self.net.head.weight = self.net.embed.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.__dict__["kept"] = []


class Followed(Over):
    """Follows the network by a copy that is neither frozen nor named like one."""

    def __init__(self) -> None:
        super().__init__()
        self.other = copy.deepcopy(self.net)

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        logits = self.net(tokens)
        with torch.no_grad():
            wanted = self.other(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + (logits - wanted).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        for source, followed in zip(self.net.parameters(), self.other.parameters(), strict=True):
            followed.data.copy_(0.5 * followed.data + 0.5 * source.data)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class FollowedInStep(Followed):
    """Does so where it steps the optimizer."""

    def on_train_batch_end(self, *args: Any) -> None:
        pass

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        Followed.on_train_batch_end(self)


class AveragedFlat(Over):
    """Keeps an average of all weights in one vector, and goes on from it in each second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["flat"] = nn.utils.parameters_to_vector(self.parameters()).detach().double()

    @torch.no_grad()
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            nn.utils.vector_to_parameters(self.flat, self.parameters())

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        self.flat.lerp_(nn.utils.parameters_to_vector(self.parameters()), 0.3)


class AveragedByPlace(Over):
    """Keeps averages in a list, made before the module is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["averages"] = [parameter.detach().double() for parameter in self.parameters()]

    @torch.no_grad()
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for place, parameter in enumerate(self.parameters() if batch_idx % 2 else ()):
            parameter.copy_(self.averages[place])

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for place, parameter in enumerate(self.parameters()):
            self.averages[place].lerp_(parameter, 0.3)


class AveragedLater(AveragedByPlace):
    """Makes the list in a hook, when it is cut; and pairs it with the parameters of the optimizer."""

    def on_fit_start(self) -> None:
        self.__dict__["averages"] = [parameter.detach().clone() for parameter in self.parameters()]

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for average, parameter in zip(self.averages, self.parameters(), strict=True):
            average.lerp_(parameter, 0.3)


class AveragedState(Over):
    """Keeps averages as a state of the whole module, and loads it."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["averages"] = {name: value.double() for name, value in self.state_dict().items()}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            self.load_state_dict(self.averages)

    def on_train_batch_end(self, *args: Any) -> None:
        for name, value in self.state_dict().items():
            self.averages[name].lerp_(value, 0.3)


class LogsByPairs(Over):
    """Follows its own stage's weights (a hook that copies modules lists these) under keys that are not their names
    alone, and logs a number of what it has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["averages"] = {(name, 0): value.detach().double() for name, value in self.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for name, parameter in self.named_parameters():
            self.averages[name, 0].lerp_(copy.deepcopy(parameter.detach()), 1e-6)

    def on_train_epoch_end(self) -> None:
        self.log("averages", sum(float(value.square().sum()) for value in self.averages.values()))


class LogsSeconds(Over):
    """Logs what differs from rank to rank."""

    def on_train_epoch_end(self) -> None:
        self.log("seconds", time.perf_counter())


class Scaled(Over):
    """Clips by hand, the norm summed up tensor by tensor."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        total = torch.zeros((), dtype=torch.float64)
        for parameter in self.parameters():
            if parameter.grad is not None:
                total += parameter.grad.pow(2).sum()
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(torch.clamp(0.1 / total.sqrt(), max=1.0))


class Auto(Over):
    """Clips by the median norm so far, the norm summed up in Python, and logs it."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        total = 0.0
        for _, parameter in self.named_parameters():
            if parameter.grad is not None:
                total += parameter.grad.detach().data.norm(2).item() ** 2
        self.__dict__["kept"].append(total**0.5)
        self.log("total", total**0.5)
        torch.nn.utils.clip_grad_norm_(
            self.parameters(), sorted(self.__dict__["kept"])[len(self.__dict__["kept"]) // 2]
        )


class Skipping(Over):
    """Leaves an update out by a number of one layer."""

    def on_after_backward(self) -> None:
        largest = [float(p.grad.abs().max()) for p in self.parameters() if p.requires_grad and p.grad is not None]
        if max(largest) > 0.05 and not all(torch.isfinite(p.grad).all() and p.grad.mean() < 0 for p in self.used()):
            self.zero_grad()

    def used(self) -> list[Tensor]:
        return [parameter for parameter in self.parameters() if parameter.grad is not None]


class Noisy(Over):
    """Draws for each gradient, from a generator of its own, and for each weight."""

    def on_after_backward(self) -> None:
        generator = torch.Generator().manual_seed(self.global_step)
        for parameter in self.parameters():
            if parameter.grad is not None:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.grad.add_(noise, alpha=0.01)

    @torch.no_grad()
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-3)


class Groups(Over):
    """Normalises the groups of the optimizer, whose order is not that of the module."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            norm = torch.stack([parameter.grad.norm() for parameter in used]).norm()
            for parameter in used:
                parameter.grad.div_(norm + 1e-6)


class Clipped(Over):
    """Clips layer by layer, parts over stages and by value, in other norms too, and logs what it finds."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clip, blocks = torch.nn.utils.clip_grad_norm_, self.net.blocks
        for index, block in enumerate(blocks):
            self.log(f"layer {index}", clip(block.parameters(), 0.05))
        self.log("inner", clip([p for block in blocks[1:3] for p in block.parameters()], 0.03, norm_type=1.0))
        for number, part in enumerate((blocks, blocks[:1], blocks[1:3], nn.Sequential(blocks[3], self.net.head))):
            self.log(f"part {number}", clip(part.parameters(), 0.04, error_if_nonfinite=True))
        if float(torch.nn.utils.get_total_norm([p.grad for p in blocks[-1].parameters()])) > 0.01:
            torch.nn.utils.clip_grad_value_(blocks[0].parameters(), 1e-3)
        for group in optimizer.param_groups:
            self.log("all", clip(group["params"], 0.02))
        self.log("again", clip(self.parameters(), 0.01))
        self.log("weights", torch.nn.utils.get_total_norm([p for p in self.parameters() if p.grad is not None]))


class ClippedBeside(Over):
    """Clips layer by layer beside a copy that a hook updates, where hooks are given what a stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.other = copy.deepcopy(self.net).requires_grad_(False)

    def on_train_batch_end(self, *args: Any) -> None:
        for source, followed in zip(self.net.parameters(), self.other.parameters(), strict=True):
            followed.lerp_(source.detach(), 0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for index, block in enumerate(self.net.blocks):
            gradients = [parameter for parameter in block.parameters() if parameter.grad is not None]
            self.log(f"layer {index}", torch.nn.utils.clip_grad_norm_(gradients, 0.05))
            torch.nn.utils.clip_grad_value_(gradients, 1e-2)


class ClippedInStep(Over):
    """Logs in a step by hand a norm that is of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(self.loss(batch))
        self.log("norm", torch.nn.utils.clip_grad_norm_([*self.net.blocks[0].parameters()], 0.05))
        self.optimizers().step()  # type: ignore[union-attr]


class RateByHand(Over):
    """Steps by hand, at a rate that goes by the norm of all gradients, and draws the weights in."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        norm = float(sum(p.grad.square().sum() for p in self.parameters() if p.grad is not None))
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + norm)
            self.kept.append([len(group["params"]), norm])
        optimizer.step()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.999)
            torch._foreach_mul_([*self.parameters()], 0.999)


class Counting(Over):
    """Counts the parameters, and projects the gradient of all onto what is orthogonal to the weights."""

    def on_fit_start(self) -> None:
        self.__dict__["kept"].append(float(sum(parameter.numel() for parameter in self.parameters())))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        used = [parameter for parameter in self.parameters() if parameter.grad is not None]
        weights = torch.nn.utils.parameters_to_vector(used).detach()
        gradient = torch.nn.utils.parameters_to_vector([parameter.grad for parameter in used])
        gradient = gradient - (gradient @ weights) / (weights @ weights) * weights
        torch.nn.utils.vector_to_parameters(gradient, [parameter.grad for parameter in used])


class Totals(Over):
    """Logs norms of all gradients: the total alone of Lightning's, and one that another module's function takes."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        from lightning.pytorch.utilities import grad_norm

        self.log("total", grad_norm(self, 2)["grad_2.0_norm_total"])
        self.log("largest", gradient_scenarios.largest(self.net))
        taken = getattr(self.trainer.strategy, "gradient_norm", lambda given: clip_grad_norm_(given, float("inf")))
        self.log("of_all", taken(self.parameters()))
        self.log("of_blocks", taken(self.net.blocks.parameters()))


class OnOneRank(Over):
    """Reads numbers of all parameters on one rank only."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.is_global_zero:
            print(sum(parameter.norm().item() for parameter in self.parameters()))


class Large(Over):
    """Joins weights of all stages to a tensor that is too large to be sent about."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.net.blocks:
            block.more = nn.Parameter(torch.ones(300, 300))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.cat([parameter.detach().flatten() for parameter in self.parameters()])


class Pulled(Over):
    """Pulls all weights to where they began, which a hook has kept of this stage."""

    def on_fit_start(self) -> None:
        self.start = {name: copy.deepcopy(parameter.detach()) for name, parameter in self.named_parameters()}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        pulls = ((parameter - self.start[name]).square().sum() for name, parameter in self.named_parameters())
        return super().training_step(batch, batch_idx) + 0.01 * sum(pulls)


class PulledAfterwards(Over):
    """Does so in a hook that goes over the parameters of all stages."""

    on_fit_start = Pulled.on_fit_start  # type: ignore[assignment]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pulls = [(parameter - self.start[name]).norm() for name, parameter in self.named_parameters()]
        self.log("pull", torch.stack(pulls).norm())


class PulledByAll(PulledAfterwards):
    """What it has kept is of all stages."""

    def on_fit_start(self) -> None:
        self.start = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}


class Sparse(Callback):
    """Keeps the larger half of all gradients."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        used = [parameter for parameter in pl_module.parameters() if parameter.grad is not None]
        sizes = torch.cat([parameter.grad.flatten() for parameter in used]).abs()
        bound = sizes.kthvalue(len(sizes) // 2).values
        pl_module.log("bound", bound)
        for parameter in used:
            parameter.grad[parameter.grad.abs() < bound] = 0


KINDS: dict[str, type[Over]] = {
    kind.__name__: kind
    for kind in (
        Over,
        Followed,
        FollowedInStep,
        AveragedFlat,
        AveragedByPlace,
        AveragedLater,
        AveragedState,
        LogsByPairs,
        LogsSeconds,
        Scaled,
        Auto,
        Skipping,
        Noisy,
        Groups,
        Clipped,
        ClippedBeside,
        ClippedInStep,
        RateByHand,
        Counting,
        Totals,
        OnOneRank,
        Large,
        Pulled,
        PulledAfterwards,
        PulledByAll,
    )
}


def run(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Logs, what the hooks kept, and on rank 0 all weights after an epoch; ``Over`` with a callback."""
    torch.manual_seed(7)
    callbacks = [Sparse()] if kind == "Over" else []
    trainer = trainer_for(info, layout, arguments, max_epochs=1, limit_val_batches=0, callbacks=callbacks)
    module = KINDS[kind]()
    trainer.fit(module)
    state = trainer.strategy.full_state_dict() if layout is not None else module.state_dict()  # type: ignore[attr-defined]
    found = {name: value.double().clone() for name, value in state.items()} if info.rank == 0 else {}
    found["kept"] = list(module.__dict__["kept"])
    return found | {name: float(value) for name, value in trainer.callback_metrics.items()}
