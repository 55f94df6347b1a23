"""Hooks that look along a dim over which tensor-parallel ranks split a weight."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.func import functional_call

from lightning_megatron.layers.whole import in_steps
from tests.harness import RankInfo
from tests.parity.scenario import Layout, trainer_for
from tests.parity.zoo.loops import Walker
from tests.parity.zoo.tasks import TokenTask


def matrices(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.ndim == 2]


class Normalised(TokenTask):
    """Unit columns after each step, gradients centred and clipped by rows, and what they were, logged."""

    def __init__(self) -> None:
        super().__init__(Walker())

    def on_after_backward(self) -> None:
        for _, weight in matrices(self):
            if weight.grad is not None:
                weight.grad.sub_(weight.grad.mean(dim=1, keepdim=True))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for _, weight in matrices(self):
            if weight.grad is not None:
                norm = weight.detach().norm(dim=1, keepdim=True).clamp(min=1e-3)
                found = weight.grad.norm(dim=1, keepdim=True).clamp(min=1e-6)
                weight.grad.copy_(torch.where(found > 0.1 * norm, weight.grad * (0.1 * norm / found), weight.grad))

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for _, weight in matrices(self):
            if weight.grad is not None:
                weight.grad.mul_((0.5 / weight.grad.norm().clamp(min=1e-9)).clamp(max=1.0))

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for name, weight in matrices(self):
            weight.div_(weight.norm(dim=0, keepdim=True).clamp(min=0.5))
            self.log(f"norm/{name}", weight.norm())


class Trusted(TokenTask):
    """Scales gradients by the norms of weights in a closure of its own (LARS, You et al., arXiv 1708.03888)."""

    def __init__(self) -> None:
        super().__init__(Walker())

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def scaled() -> Any:
            loss = optimizer_closure()
            for _, weight in matrices(self):
                if weight.grad is not None:
                    weight.grad.mul_(0.1 * weight.detach().norm() / weight.grad.norm().clamp(min=1e-9))
            return loss

        optimizer.step(closure=scaled)


class Adversary(TokenTask):
    """A second loss on perturbed embeddings (FGM), and a teacher that follows."""

    def __init__(self) -> None:
        super().__init__(Walker())

    def on_fit_start(self) -> None:
        self.__dict__["kept"] = {name: weight.detach().clone() for name, weight in self.named_parameters()}
        self.__dict__["twin"] = copy.deepcopy(self.net)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.__dict__["batch"] = batch
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss

    def on_after_backward(self) -> None:
        table = matrices(self)[0][1]
        assert table.grad is not None
        before = table.data.clone()
        table.data.add_(0.1 * table.grad / table.grad.norm())
        self.loss(self.__dict__["batch"]).backward()
        table.data.copy_(before)

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for name, weight in self.named_parameters():
            self.kept[name].mul_(0.9).add_(weight, alpha=0.1)
            weight.lerp_(self.kept[name], 0.2)
        for own, other in zip(self.twin.parameters(), self.net.parameters(), strict=True):
            own.mul_(0.5).add_(other, alpha=0.5)
            other.add_(own - own.mean(), alpha=0.01)


class Afresh(TokenTask):
    """Starts weights anew, masks gradients by the shape of a table, and normalises those of a matrix."""

    def __init__(self) -> None:
        super().__init__(Walker())
        (_, table), *_, (_, last) = matrices(self)
        mask = torch.rand(table.shape) > 0.3
        table.register_hook(lambda grad: grad * mask)
        last.register_hook(lambda grad: grad / grad.norm())
        norm = next(parameter for name, parameter in self.named_parameters() if name.endswith("ln_1.weight"))
        norm.register_hook(lambda grad: grad.div_(grad.norm()))

    def on_fit_start(self) -> None:
        for _, weight in matrices(self):
            nn.init.orthogonal_(weight)

    def on_train_epoch_end(self) -> None:
        for _, weight in matrices(self):
            weight.data[1] = 0.0
            weight.data.view(-1)[5:9].mul_(2)

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            self.__dict__["alone"] = float(sum(weight.detach().norm() for _, weight in matrices(self)))


class Penalised(TokenTask):
    """Penalties on weights in the step, from the second step on; a perturbed embedding; rows of a matrix kept short."""

    def __init__(self) -> None:
        super().__init__(Walker())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (_, table), *_, (_, last) = matrices(self)
        with torch.no_grad():
            last.div_(last.norm(dim=1, keepdim=True).clamp(min=1.0))
        loss = self.loss(batch)
        (gradient,) = torch.autograd.grad(loss, table, retain_graph=True)
        with torch.no_grad():
            table.add_(0.1 * gradient / gradient.norm())
        loss = loss + self.loss(batch)
        with torch.no_grad():
            table.sub_(0.1 * gradient / gradient.norm())
        self.log("norm", last.norm())
        return loss + self.penalty() if self.trainer.global_step else loss

    def penalty(self) -> Tensor:
        every = sum(parameter.square().sum() for parameter in self.parameters())
        (_, table), *middle, (_, last) = matrices(self)
        rows = sum(weight.norm(dim=1).sum() + weight.std(dim=0).mean() for _, weight in middle)
        alike = (
            torch.linalg.matrix_norm(last, 2) + (table.mT @ table - torch.eye(table.shape[1]).to(table)).abs().mean()
        )
        return 1e-2 * every + 1e-3 * rows + 1e-2 * alike + F.cosine_similarity(table[0], table[-1], dim=0)


class Smooth(TokenTask):
    """A penalty on the gradient of the loss with respect to what the layers are given."""

    def __init__(self) -> None:
        super().__init__(Walker())

    def loss(self, batch: Any) -> Tensor:
        x = self.net.embed(batch[0])
        logits = self.net.head(self.net.walk(x))
        loss = -F.log_softmax(logits, -1).gather(-1, batch[1].unsqueeze(-1)).mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + 100.0 * gradient.square().sum()


class Scales(TokenTask):
    """A penalty on the weights of norms alone."""

    def __init__(self) -> None:
        super().__init__(Walker())

    def loss(self, batch: Any) -> Tensor:
        scales = [weight for name, weight in self.named_parameters() if "ln_" in name]
        loss: Tensor = super().loss(batch)
        return loss + sum((weight - 0.5).square().sum() for weight in scales)


class Hooked(TokenTask):
    """Gradient hooks that are not linear, before and after gradients are added up."""

    def __init__(self) -> None:
        super().__init__(Walker())
        for _, weight in matrices(self):
            weight.register_hook(lambda grad: grad / (1e-3 + grad.norm()))

    def on_fit_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(shorten)


def shorten(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_((0.5 / parameter.grad.norm()).clamp(max=1.0))


class Iterated(TokenTask):
    """Orthogonal matrices, a spectral norm by power iteration, a pull to the start, decay by hand, and logged norms."""

    def __init__(self) -> None:
        super().__init__(Walker())
        for index, (_, weight) in enumerate(matrices(self)):
            self.register_buffer(f"left{index}", F.normalize(torch.ones(weight.shape[0]), dim=0))

    def on_fit_start(self) -> None:
        self.__dict__["start"] = {name: weight.detach().clone() for name, weight in self.named_parameters()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for name, weight in self.named_parameters():
            if weight.grad is not None:  # of the batch before
                self.log(f"before/{name}", weight.grad.norm())
            if weight.ndim > 1:
                with torch.no_grad():
                    weight.mul_(0.999)
        return self.loss(batch) + self.penalty()

    def penalty(self) -> Tensor:
        total = 0.1 * sum((weight - self.start[name]).square().sum() for name, weight in matrices(self))
        for index, (_, weight) in enumerate(matrices(self)):
            left = getattr(self, f"left{index}")
            with torch.no_grad():
                right = F.normalize(torch.mv(weight.t(), left), dim=0)
                left.copy_(F.normalize(torch.mv(weight, right), dim=0))
            gram = weight.mT @ weight if weight.shape[0] > weight.shape[1] else weight @ weight.mT
            total = total + 1e-3 * (gram - torch.eye(len(gram)).to(gram)).square().sum()
            total = total + 1e-2 * torch.dot(left.clone(), torch.mv(weight, right))
        return total

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for index, block in enumerate(self.net.blocks):
            norms = [weight.grad.norm() for weight in block.parameters() if weight.grad is not None]
            self.log(f"block{index}", torch.stack(norms).norm())


class Fast(TokenTask):
    """The loss after a step of gradient descent, by weights that a function is called with."""

    def __init__(self) -> None:
        super().__init__(Walker())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        named = dict(self.net.named_parameters())
        gradients = torch.autograd.grad(self.loss(batch), list(named.values()))
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        moved = {name: p - 0.5 * g / norm for (name, p), g in zip(named.items(), gradients, strict=True)}
        logits = functional_call(self.net, moved, (batch[0],))
        self.log("far", sum((moved[name] - p).square().sum() for name, p in named.items()))
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByHand(TokenTask):
    """Two backwards by hand, the second on perturbed embeddings, and the clipped sum of both."""

    def __init__(self) -> None:
        super().__init__(Walker())
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        table = matrices(self)[0][1]
        assert table.grad is not None
        before = table.data.clone()
        table.data.add_(0.1 * table.grad / torch.norm(table.grad))
        self.loss(batch).backward()
        table.data = before
        nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        optimizer.step()
        self.log("norm", table.norm())
        return loss.detach()


class Curious(TokenTask):
    """Looks at weights and gradients on one rank, after the layers have run."""

    def __init__(self) -> None:
        super().__init__(Walker())
        self.__dict__["alone"] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.trainer.is_global_zero:
            for name, weight in self.named_parameters():
                self.alone.append((name, float(weight.detach().norm()), float(weight.data.abs().max())))
                if weight.grad is not None:
                    self.alone.append((name, float(weight.grad.norm()), float(weight.grad[0].sum())))
        loss = loss + 0.01 * sum(torch.linalg.matrix_norm(weight, 2) for _, weight in matrices(self))
        self.log("loss", loss)
        return loss


class Drawn(TokenTask):
    """Draws weights anew, of every layer in turn."""

    def __init__(self) -> None:
        super().__init__(Walker())

    def on_fit_start(self) -> None:
        for block in self.net.blocks:
            nn.init.orthogonal_(block.mlp[0].weight)
            nn.init.kaiming_uniform_(block.mlp[2].weight)
            nn.init.uniform_(block.mlp[0].bias, -0.1, 0.1)


class Columns(Callback):
    """Reaches in from outside."""

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        weight = pl_module.net.blocks[1].mlp[0].weight  # type: ignore[union-attr, index]
        weight.mul_((2.0 / torch.linalg.matrix_norm(weight, 2)).clamp(max=1.0))


KINDS = {kind.__name__: kind for kind in (Normalised, Adversary, Afresh, Penalised, Scales, Smooth, Hooked, Drawn)}
KINDS |= {kind.__name__: kind for kind in (Iterated, Fast, ByHand, Curious, Trusted)}


def run(
    info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], kind: str, batches: int = 1
) -> dict[str, Any]:
    """Losses, logs and norms of all weights after a few steps, of so many batches each."""
    torch.manual_seed(7)
    found: dict[str, Any] = {}
    options = {"max_epochs": 1, "limit_val_batches": 0, "accumulate_grad_batches": batches}
    trainer = trainer_for(info, layout, arguments, callbacks=[Columns()], **options)
    module = KINDS[kind]()
    trainer.fit(module)
    state = trainer.strategy.full_state_dict() if layout is not None else module.state_dict()
    if info.rank == 0:
        found |= {name: value.double().clone() for name, value in state.items()}
        found["alone"] = module.__dict__.get("alone")
    return found | {name: float(value) for name, value in trainer.callback_metrics.items()}


class OnOneRank(TokenTask):
    """Changes a weight on one rank only."""

    def __init__(self) -> None:
        super().__init__(Walker())

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.is_global_zero:
            matrices(self)[-1][1].data.mul_(0.5)


class TooEarly(TokenTask):
    """Looks at a weight on one rank, before layers in which the ranks need each other."""

    def __init__(self) -> None:
        super().__init__(Walker())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.is_global_zero:
            matrices(self)[-1][1].norm()
        return self.loss(batch)


class Aside(TokenTask):
    """Looks at a weight in a thread."""

    def __init__(self) -> None:
        super().__init__(Walker())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            norm = pool.submit(lambda: float(matrices(self)[-1][1].norm()))
        return self.loss(batch) * norm.result()


class Keeps(TokenTask):
    """Keeps a view of a weight."""

    def __init__(self) -> None:
        super().__init__(Walker())

    def on_fit_start(self) -> None:
        self.__dict__["kept"] = matrices(self)[-1][1].data


class OwnBackward(Adversary):
    """Adds gradients that nobody sums."""

    def on_train_batch_end(self, *args: Any) -> None:
        pass


class OwnBatches(TokenTask):
    """Draws other samples on every rank."""

    def __init__(self) -> None:
        super().__init__(Walker())

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [part.roll(self.global_rank, -1) + self.global_rank for part in batch]


class Pruned(TokenTask):
    """Has a callback that prunes."""

    def __init__(self) -> None:
        super().__init__(Walker())


REFUSED = {kind.__name__: kind for kind in (OnOneRank, TooEarly, Aside, Keeps, OwnBackward, OwnBatches, Pruned)}


def refused(info: RankInfo, layout: Layout, arguments: Mapping[str, Any], kind: str) -> None:
    """Trains one that is refused."""
    torch.manual_seed(7)
    pruning = [ModelPruning("l1_unstructured", amount=0.5)] if kind == "Pruned" else []
    trainer = trainer_for(info, layout, arguments, max_epochs=1, limit_val_batches=0, callbacks=pruning)
    with mock.patch.object(in_steps, "_PATIENCE_S", 2.0):
        trainer.fit(REFUSED[kind]())
