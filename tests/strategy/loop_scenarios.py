"""Steps that drive their optimizers themselves, closures, penalties on gradients, and batch norm over replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trainer_for
from tests.parity.zoo.blocks import HIDDEN
from tests.parity.zoo.data import BATCH, LENGTH, VOCABULARY
from tests.parity.zoo.language import LearnedPositions
from tests.parity.zoo.tasks import TokenTask


class Seen(Callback):
    """What was logged after every batch."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.values.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def fit(
    info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], name: str, options: Mapping[str, Any]
) -> Any:
    """Trains the module called ``name`` for two epochs; metrics after every batch, steps, and batch norms' state."""
    seen = Seen()
    torch.manual_seed(7)
    module = MODULES[name]()
    arguments = dict(arguments)
    if layout is not None and layout[0] > 1:
        arguments = {"micro_batch_size": BATCH // layout[1], **arguments}
    if layout is not None and layout[0] == 1:
        arguments = {"micro_batch_size": "auto", **arguments}
    trainer = trainer_for(info, layout, arguments, max_epochs=2, callbacks=[seen], **options)
    trainer.fit(module)
    norms = {name: buffer.clone() for name, buffer in module.named_buffers() if "running" in name}
    return [seen.values, trainer.global_step, norms]


class Manual(TokenTask):
    """Drives its optimizer by hand."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net or LearnedPositions())
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class OwnBackward(Manual):
    """Calls the loss's own backward, of two parts of the loss, and one more of an input only."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        (noise := torch.ones(3, requires_grad=True)).square().sum().backward(inputs=[noise])
        (0.25 * loss).backward(retain_graph=True)
        torch.autograd.backward([0.75 * loss])
        optimizer.step()
        optimizer.zero_grad()


class OwnDescent(OwnBackward):
    """The same where a gradient's size counts."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scheduled(Manual):
    """Accumulates over two batches, clips by torch's own function, reads its loss, and steps a schedule by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        self.log("train_loss", loss := self.loss(batch), sync_dist=True)
        self.manual_backward(loss)
        if batch_idx % 2 == 1 and loss.item() > 0:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)
            optimizer.step()  # type: ignore[union-attr]
            optimizer.zero_grad()  # type: ignore[union-attr]
            schedule.step()  # type: ignore[union-attr]
        return {"loss": loss, "rate": optimizer.param_groups[0]["lr"]}  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class TwoParts(Manual):
    """Two optimizers of one loss, of which one steps every other batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        often, seldom = self.optimizers()  # type: ignore[misc, attr-defined]
        if batch_idx == 2:
            return None
        self.manual_backward(loss := self.loss(batch))
        often.step()
        often.zero_grad()
        if batch_idx % 2:
            seldom.step()
            seldom.zero_grad()
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        rest = [p for name, p in self.net.named_parameters() if not name.startswith("layers")]
        return [torch.optim.SGD(self.net.layers.parameters(), lr=0.1), torch.optim.AdamW(rest, lr=1e-2)]


class LeftOut(TokenTask):
    """Leaves batches out: one by its number, others by their loss."""

    def __init__(self) -> None:
        super().__init__(LearnedPositions())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        if batch_idx == 1:
            return None
        return loss if int(loss * 1000) % 3 else None

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class LeftOutEarly(LeftOut):
    """Leaves batches out before the layers, the first among them, and counts them; one behind the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[int] = []
        self.register_buffer("running_left", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx in (0, 2):
            self.left.append(batch_idx)
            self.running_left += 1
            self.log("left", float(len(self.left)))
            return None
        self.log("train_loss", loss := self.loss(batch), sync_dist=True)
        return loss if self.current_epoch or batch_idx != 1 else None


class TwoForwards(Manual):
    """Calls the layers for two losses, and then their backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch) + self.loss(batch))


class TwoBackwards(Manual):
    """Gives two losses of one forward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.manual_backward(loss / 2, retain_graph=True)
        self.manual_backward(loss / 2)


class PenaltyBefore(Manual):
    """Takes a gradient with respect to what goes into the layers, and also around them."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = first = self.net.token_embedding(batch[0]) + self.net.positions
        for layer in self.net.layers:
            x = layer(x)
        loss = (x + first).square().mean()
        (gradient,) = torch.autograd.grad(loss, first, retain_graph=True)
        self.manual_backward(loss * gradient.norm())


class PicturesFirst(Manual):
    """Calls the model once to look at what it gives, and again for the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.seen = self.net(batch[0])
        self.manual_backward(self.loss(batch))


class ReadsParts(Manual):
    """Decides by a number that only one stage has."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        if loss > 0:
            self.manual_backward(loss)


class SingleGradients(Manual):
    """Looks at gradients, and at weights, of single layers by name between backward and step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(loss := self.loss(batch))
        first_weight, last_weight = (layer.mlp[0].weight for layer in (self.net.layers[0], self.net.layers[-1]))
        for weight in (first_weight, last_weight):
            if weight.grad is not None:
                weight.grad.clamp_(-1e-3, 1e-3)
            weight.grad = weight.grad * 0.5 + 0.01 * weight
        last_weight.grad /= 3.0
        with torch.no_grad():
            first_weight.add_(first_weight.grad, alpha=-0.1)
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        self.log("train_loss", loss, sync_dist=True)
        return loss


class CopiesGradient(SingleGradients):
    """Writes the gradient of one layer into that of another."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        first, last = (layer.mlp[0].weight for layer in (self.net.layers[0], self.net.layers[-1]))
        first.grad.copy_(last.grad)
        self.optimizers().step()  # type: ignore[union-attr, call-arg]


class NeverZero(TokenTask):
    """Goes on from the gradients of the steps before."""

    def __init__(self) -> None:
        super().__init__(LearnedPositions())

    def optimizer_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.03)


class Adversaries(Manual):
    """A generator and a discriminator, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def features(self, batch: Any) -> Tensor:
        x = self.net.token_embedding(batch[0]) + self.net.positions[:LENGTH]
        for layer in self.net.layers:
            x = layer(x)
        return self.net.final_norm(x).mean(1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        ours, theirs = self.optimizers()  # type: ignore[misc, attr-defined]
        real = F.one_hot(batch[1][:, 0] % HIDDEN, HIDDEN).to(self.net.positions.dtype)
        self.toggle_optimizer(ours)
        loss = F.softplus(-self.critic(self.features(batch))).mean()
        ours.zero_grad()
        self.manual_backward(loss)
        ours.step()
        self.untoggle_optimizer(ours)
        self.toggle_optimizer(theirs)
        fake = self.features(batch).detach()
        other = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake)).mean()
        theirs.zero_grad()
        self.manual_backward(other)
        theirs.step()
        self.untoggle_optimizer(theirs)
        self.log_dict({"generator": loss, "critic": other}, sync_dist=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.critic(self.features(batch)).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (self.net, self.critic)]


class CriticFirst(Adversaries):
    """The critic's turn comes first, and the generator steps where nothing has reached it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        ours, theirs = self.optimizers()  # type: ignore[misc, attr-defined]
        real = F.one_hot(batch[1][:, 0] % HIDDEN, HIDDEN).to(self.net.positions.dtype)
        other = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(self.features(batch).detach())).mean()
        self.manual_backward(other)
        theirs.step()
        theirs.zero_grad()
        ours.step()
        loss = F.softplus(-self.critic(self.features(batch))).mean()
        self.manual_backward(loss)
        ours.step()
        ours.zero_grad()
        theirs.zero_grad()
        self.log_dict({"generator": loss, "critic": other}, sync_dist=True)


class Closures(TokenTask):
    """LBFGS calls its closure several times a step."""

    def __init__(self) -> None:
        super().__init__(LearnedPositions())

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class ClosuresByHand(Manual):
    """The same with a closure of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)
        self.log("train_loss", self.loss(batch).detach(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimization (Foret et al., 2020): a gradient a little uphill, by the norm of all gradients."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        again = torch.enable_grad()(closure)
        loss = again()
        members = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in members if p.grad is not None]).norm()
        uphill = [0.05 * p.grad / norm for p in members if p.grad is not None]
        torch._foreach_add_(members, uphill)
        again()
        torch._foreach_sub_(members, uphill)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad)
        return loss


class ScaledByGradients(Manual):
    """Weighs a second loss by the sizes of both losses' gradients of the last norm, as VQ-GAN weighs its critic's.

    Args:
        gathers: whether it takes the mean of the replicas' gradients.
        beside: whether it gathers another number as well, after it has taken them.
    """

    def __init__(self, gathers: bool = False, beside: bool = False) -> None:
        super().__init__()
        self.gathers, self.beside = gathers, beside

    def size(self, loss: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, [self.net.final_norm.weight], retain_graph=True)
        return self.all_gather(gradient).reshape(-1, HIDDEN).mean(0).norm() if self.gathers else gradient.norm()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        other = logits.square().mean()
        weight = (self.size(loss) / (self.size(other) + 1e-4)).detach()
        if self.beside:
            self.log("size", self.all_gather(logits.detach().abs().mean()).mean())
        self.log("train_loss", loss + 0.1 * weight * other, sync_dist=True)
        optimizer.zero_grad()
        self.manual_backward(loss + 0.1 * weight * other)
        optimizer.step()


class UphillByHand(Manual):
    """The same by hand, with the norm of the whole model's gradients, or by hand, of what the step sees."""

    def __init__(self, whole: bool = True) -> None:
        super().__init__()
        self.whole = whole

    def norm(self, members: list[nn.Parameter]) -> Tensor:
        gradient_norm = getattr(self.trainer.strategy, "gradient_norm", None)
        if self.whole and gradient_norm is not None:
            return gradient_norm(members)
        return torch.stack([p.grad.norm() for p in members if p.grad is not None]).norm()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        members = list(self.parameters())
        norm = self.norm(members)
        uphill = [0.05 * p.grad / norm for p in members if p.grad is not None]
        with torch.no_grad():
            torch._foreach_add_(members, uphill)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            torch._foreach_sub_(members, uphill)
        optimizer.step()
        self.log("train_loss", loss, sync_dist=True)


class NoiseOfRanks(Manual):
    """Adds noise to weights that every rank draws for itself."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        own = torch.Generator().manual_seed(self.global_rank)
        with torch.no_grad():
            for weight in self.parameters():
                weight.add_(torch.randn(weight.shape, generator=own, dtype=weight.dtype), alpha=0.01)


class Uphill(TokenTask):
    """Trained by an optimizer that calls its closure twice."""

    def __init__(self) -> None:
        super().__init__(LearnedPositions())

    def configure_optimizers(self) -> Any:
        return Sharpness(self.parameters())


class Penalty(TokenTask):
    """Penalises the gradient of each sample's score with respect to its embedding."""

    def __init__(self) -> None:
        super().__init__(LearnedPositions())

    def gradient(self, score: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        raise TypeError(f"{type(self).__name__} has no penalty")

    def loss(self, batch: Any) -> Tensor:
        with torch.enable_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            first = x = self.net.token_embedding(batch[0])
            for layer in self.net.layers:
                x = layer(x)
            logits = F.linear(self.net.final_norm(x), self.net.token_embedding.weight)
            losses = F.cross_entropy(logits.transpose(1, 2), batch[1], reduction="none").mean(1)
            if not self.training:
                return losses.mean()
            (gradient,) = self.gradient(losses.sum(), first)
        return losses.mean() + 10 * gradient.square().sum((1, 2)).mean()


class InputPenalty(Penalty):
    """Says so."""

    def gradient(self, score: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(score, x, create_graph=True)


class HiddenPenalty(Penalty):
    """Takes it by a call of which the code does not tell what it does."""

    def gradient(self, score: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(score, x, **{"create" + "_graph": True})  # type: ignore[arg-type]


class NormedLayer(nn.Module):
    """A residual layer with a batch norm over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(LENGTH), nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class BatchNorms(nn.Module):
    """Batch norms before, inside and after the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.first, self.last = nn.BatchNorm1d(LENGTH, momentum=None), nn.BatchNorm1d(LENGTH, affine=False)
        self.layers = nn.ModuleList([NormedLayer() for _ in range(4)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(x))


MODULES: dict[str, Any] = {
    "manual": Manual,
    "own_backward": OwnBackward,
    "own_descent": OwnDescent,
    "scheduled": Scheduled,
    "two_parts": TwoParts,
    "single_gradients": SingleGradients,
    "copies_gradient": CopiesGradient,
    "left_out": LeftOut,
    "left_out_early": LeftOutEarly,
    "two_forwards": TwoForwards,
    "two_backwards": TwoBackwards,
    "penalty_before": PenaltyBefore,
    "pictures_first": PicturesFirst,
    "reads_parts": ReadsParts,
    "critic_first": CriticFirst,
    "never_zero": NeverZero,
    "adversaries": Adversaries,
    "closures": Closures,
    "closures_by_hand": ClosuresByHand,
    "scaled_by_gradients": ScaledByGradients,
    "scaled_beside_gathered": lambda: ScaledByGradients(beside=True),
    "scaled_by_gathered": lambda: ScaledByGradients(gathers=True),
    "uphill": Uphill,
    "uphill_by_hand": UphillByHand,
    "noise_of_ranks": NoiseOfRanks,
    "uphill_by_slices": lambda: UphillByHand(whole=False),
    "input_penalty": InputPenalty,
    "hidden_penalty": HiddenPenalty,
    "batch_norms": lambda: TokenTask(BatchNorms()),
}
