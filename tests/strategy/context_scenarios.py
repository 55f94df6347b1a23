"""Steps that a rank which holds some tokens cannot take, as users write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from lightning_megatron import MegatronStrategy
from tests.checkpoints.reshard_scenarios import HIDDEN, Layer
from tests.harness import RankInfo
from tests.parity.train import make_trainer
from tests.parity.zoo.data import VOCABULARY
from tests.parity.zoo.language import LearnedPositions
from tests.parity.zoo.tasks import TokenTask


class Penalty(TokenTask):
    """Adds the norm of a gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        weight = next(self.net.layers.parameters())
        return loss + torch.autograd.grad(loss, weight, create_graph=True)[0].square().sum()


class Hooked(TokenTask):
    """Looks at a layer's gradient."""

    def on_train_start(self) -> None:
        self.net.layers[0].register_full_backward_hook(lambda *_: None)


class Watched(TokenTask):
    """Looks at a weight's gradient."""

    def on_train_start(self) -> None:
        next(self.net.parameters()).register_hook(lambda grad: grad)


class Short(TokenTask):
    """Has fewer tokens than ranks."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch[0][:, :1], batch[1][:, :1]))


class ByHand(TokenTask):
    """Drives its optimizer by hand."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False


class Causal(torch.nn.Module):
    """A decoder whose attention is torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(VOCABULARY, HIDDEN), torch.nn.Linear(HIDDEN, VOCABULARY)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Evaluated(TokenTask):
    """Leaves batches and its layers out, keeps metrics of torchmetrics, returns tensors, and shows them to hooks."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__(net)
        self.accuracy = MulticlassAccuracy(VOCABULARY, average="micro")
        self.val_accuracy = MulticlassAccuracy(VOCABULARY, average="micro")
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits.transpose(1, 2), batch[1])
        self.accuracy(logits.argmax(-1), batch[1])
        self.log("train_accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("highest", logits.max(), on_step=False, on_epoch=True, reduce_fx="max")
        return None if batch_idx == 1 else {"loss": loss, "logits": logits}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs:
            self.seen.append(float(outputs["logits"].detach().square().sum()))

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        self.val_accuracy.update(logits.transpose(1, 2), batch[1])
        self.log("val_accuracy", self.val_accuracy)
        self.log("val_loss", F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten()))
        return logits

    def test_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:  # calls no layer
            self.log_dict({"test_loss": self.net.embedding(batch[0]).square().mean(), "last": batch[1].double().std()})
            return
        self.log_dict({"test_loss": self.loss(batch), "last": self.net(batch[0])[:, -1].std()})

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        return logits.softmax(-1), logits.argmax(-1)


MODULES = {kind.__name__.lower(): kind for kind in (Penalty, Hooked, Watched, Short, ByHand)}


def every_loop(info: RankInfo, context: int, method: str) -> dict[str, Any]:
    """What fitting, validating, testing and predicting give over context ranks, or in a plain run for 0."""
    torch.manual_seed(7)
    module = Evaluated(Causal())
    options = {"method": method}
    strategy: Any = "auto"
    if context:
        strategy = MegatronStrategy(context_parallel_size=context, context_parallel_options=options)
    trainer = make_trainer(info, strategy, max_epochs=2)
    trainer.fit(module)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if context:
        told = strategy.context_report
        assert f"tokens split over {context} ranks" in told and "`max`" in told, told
        assert ("keys and values of one rank at a time" in told) == (method == "ring"), told
    for results in (*trainer.validate(module, verbose=False), *trainer.test(module, verbose=False)):
        found |= {f"then_{name}": value for name, value in results.items()}
    predicted = trainer.predict(module)
    found |= {"seen": sum(module.seen), "steps": len(module.seen)}
    found["norm"] = float(torch.stack([p.detach().square().sum() for p in module.parameters()]).sum())
    tensors = [tensor.detach() for pair in predicted or [] for tensor in pair]
    assert all(type(tensor) is Tensor for tensor in tensors)
    return found | {f"predicted{index}": tensor.tolist() for index, tensor in enumerate(tensors)}


def fit(info: RankInfo, name: str, options: dict[str, Any]) -> None:
    """Fits a module over two context ranks."""
    torch.manual_seed(7)
    module = MODULES.get(name, TokenTask)(LearnedPositions())
    make_trainer(info, MegatronStrategy(context_parallel_size=2), max_steps=2, **options).fit(module)


class Rounded(TokenTask):
    """Keeps the gradients of its layers, before the first update."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if not hasattr(self, "kept"):
            parts = [p.grad.double().flatten() for p in self.net.layers.parameters() if p.grad is not None]
            self.kept = torch.cat(parts)


def updates(info: RankInfo, context: int, options: dict[str, Any], precision: str) -> Tensor:
    """The gradients of the layers in the first step, in one precision; in a plain run for no context ranks."""
    torch.manual_seed(7)
    module = Rounded(Causal())
    sizes = {"context_parallel_size": context, "context_parallel_options": options, "optimizer_sharding": False}
    strategy = MegatronStrategy(**sizes) if context else "auto"
    make_trainer(info, strategy, max_steps=1, precision=precision, limit_val_batches=0).fit(module)
    return module.kept
