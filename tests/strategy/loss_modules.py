"""Losses that are no means over samples, and one that is; what strangers bring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

VOCABULARY, LENGTH, BATCH, STEPS = 17, 6, 8, 3


def tokens(count: int, *, padded_from: int = 0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets [count, LENGTH]; samples from ``padded_from`` on have unlike numbers of ignored targets."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator) for _ in range(2))
    for sample in range(padded_from, count):
        y[sample, LENGTH - (3 * sample) % 5 :] = -100 if (3 * sample) % 5 else y[sample, LENGTH:]
    return x, y


CUTS: list[tuple[tuple[int, int], dict[str, Any]]] = [
    ((2, 1), {}),
    ((1, 1), {"micro_batch_size": 2}),
    ((2, 1), {"pipeline_schedule": "zb-v"}),
    ((2, 1), {"pipeline_schedule": "interleaved"}),
]
"""Layouts, and arguments of the strategy, in which a batch is cut."""
UNLIKE_STEPS = 24
UNEVEN = {1: (8,), 2: (3, 5), 4: (1, 2, 4, 1)}
"""Samples of each replica, by the number of replicas; in every second step in reverse."""


def dealt(module: LightningModule, samples: TensorDataset, **options: Any) -> DataLoader[Any]:
    """A loader of this replica's samples, whose batches are parts of those of one process, in their order."""
    dealing = getattr(module.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
    own = BATCH // dealing["num_replicas"]
    chosen = [at for at in range(len(samples)) if at % BATCH // own == dealing["rank"]]
    return DataLoader(Subset(samples, chosen), batch_size=own, **options)


class Task(LightningModule):
    """A small language model in float64; the loss is that of :meth:`loss`, a token mean over padded targets."""

    drop = 0.0
    padded_from = 0
    layers_run_apart = True
    """Under a pipeline, where the loss is one of the whole batch: whether the layers run in micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(self.drop)) for _ in range(4))
        self.head = nn.Linear(8, VOCABULARY)
        self.register_buffer("balance", torch.rand(VOCABULARY) + 0.1, persistent=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits

    def each(self, x: Tensor, y: Tensor, **options: Any) -> Tensor:
        """Cross entropy over the tokens."""
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten(), **options)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.each(x, y)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> Any:
        loss = self.loss(*batch)
        self.log("loss", loss.detach().mean())
        return {"loss": loss, "size": torch.ones(len(batch[0]))}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def samples(self) -> TensorDataset:
        """Of an epoch."""
        return TensorDataset(*tokens(BATCH * STEPS, padded_from=self.padded_from))

    def train_dataloader(self) -> DataLoader[Any]:
        samples = self.samples()
        options = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        own = BATCH // options["num_replicas"]
        chosen = [at for at in range(len(samples)) if at % BATCH // own == options["rank"]]
        return DataLoader(Subset(samples, chosen), batch_size=own)


class Unlike(Task):
    """Samples of unlike lengths, padded to the longest of a batch; one for each replica."""

    def train_dataloader(self) -> DataLoader[Any]:
        lengths = [3 + at % 5 for at in range(2 * UNLIKE_STEPS)]
        samples = [(x[:n], y[:n]) for x, y, n in zip(*tokens(len(lengths)), lengths, strict=True)]
        options = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        chosen = [at for at in range(len(samples)) if at % options["num_replicas"] == options["rank"]]
        return DataLoader(Subset(samples, chosen), batch_size=max(1, 2 // options["num_replicas"]), collate_fn=padded)


class Uneven(Task):
    """A token mean of batches that a sampler of the user's own cuts, into other numbers of samples on each replica."""

    padded_from = 0

    def train_dataloader(self) -> DataLoader[Any]:
        samples = TensorDataset(*tokens(8 * STEPS, padded_from=self.padded_from))
        options = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        batches = []
        for step in range(STEPS):
            sizes = UNEVEN[options["num_replicas"]][:: -1 if step % 2 else 1]
            start = 8 * step + sum(sizes[: options["rank"]])
            batches.append(list(range(start, start + sizes[options["rank"]])))
        return DataLoader(samples, batch_sampler=batches)


class UnevenRows(Uneven):
    """The same, with a mean over samples."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return Rows.loss(self, x, y)  # type: ignore[arg-type]


class Kinds(Task):
    """Token means of batches with and without weights of their tokens, in another order on each replica."""

    padded_from = 0

    def loss(self, x: Tensor, y: Tensor, *weights: Tensor) -> Tensor:
        if not weights:
            return super().loss(x, y)
        each = self.each(x, y, reduction="none").view_as(y)
        return (each * weights[0]).sum() / weights[0].sum()

    def train_dataloader(self) -> DataLoader[Any]:
        options = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        replicas, rank = options["num_replicas"], options["rank"]
        x, y = tokens(8 * 12, padded_from=self.padded_from)
        batches = []
        for step in range(12):
            rows = slice(8 * step + 8 // replicas * rank, 8 * step + 8 // replicas * (rank + 1))
            weights = (y != -100).double()[rows]
            kind = (step + rank) % 3 == 2  # of which one process has neither: the loss is the same
            batches.append((x[rows], y[rows], weights) if kind else (x[rows], y[rows]))
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A batch of them; targets of the padding are ignored."""
    x, y = zip(*samples, strict=True)
    rows = nn.utils.rnn.pad_sequence
    return rows(list(x), batch_first=True), rows(list(y), batch_first=True, padding_value=-100)


class Late(Task):
    """Nothing is ignored in the first batch."""

    padded_from = BATCH


class Emptied(Task):
    """All targets of the first half of the second batch are ignored, and of the second half of the third."""

    def samples(self) -> TensorDataset:
        x, y = tokens(BATCH * STEPS)
        y[BATCH : BATCH + BATCH // 2] = y[-BATCH // 2 :] = -100
        return TensorDataset(x, y)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        each, kept = self.each(x, y, reduction="none").view_as(y), y != -100
        return each.sum() / kept.sum().clamp(min=1)


class Shifted(Task):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x)[:, :-1].flatten(0, 1), y[:, 1:].flatten())


class Rows(Task):
    """A mean over samples of each sample's mean: nothing to weigh."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        each, kept = self.each(x, y, reduction="none").view_as(y), y != -100
        return ((each * kept).sum(1) / kept.sum(1)).mean()


class Scale(nn.Module):
    """Puts a buffer into its state itself, as torch's modules for quantization do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = x * self.scale
        return scaled

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = self.scale


class SavesItself(Task):
    """Layers with parts that put a buffer into their state themselves."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.append(Scale().double())


class ZeroHead(Task):
    """Every token has the same loss at first, whatever weighs them."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)


class SetByFirstBatch(Task):
    """A weight that begins with zeros, and is set from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(2, VOCABULARY, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        if not self.centre.any():
            with torch.no_grad():
                self.centre.copy_(torch.stack([logits.amax((0, 1)), logits.mean((0, 1))]))
        return logits - self.centre.sum(0)


class Labelled(Task):
    """One target per sample, or none."""

    ignored = -100

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x).mean(1), y, ignore_index=self.ignored)


class Sum(Task):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.each(x, y, reduction="sum") / 1000


class OverBatchSize(Task):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.each(x, y, reduction="sum") / BATCH


class Balanced(Task):
    """The mean is weighted by class."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.each(x, y, weight=self.balance)


class Rebalanced(Balanced):
    """The classes get other weights with time."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.balance = self.balance.flip(0) + batch_idx


class Root(Task):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x).mean(-1), y.double()).sqrt()


class Invariant(Task):
    """A penalty on the gradient of a scale that the step makes after the layers."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits, scale = self(x), torch.tensor(1.0, dtype=torch.float64).requires_grad_()
        loss = F.cross_entropy((logits * scale).flatten(0, 1), y.flatten())
        (slope,) = torch.autograd.grad(loss, scale, create_graph=True)
        return loss + slope.square()


class Hardest(Task):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.each(x, y, reduction="none").topk(10).values.mean()


class Focal(Task):
    """Divided by the number of positives."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        positive = y.flatten() > 8
        return (self.each(x, y, reduction="none") * positive).sum() / positive.sum().clamp(min=1)


class InBatch(Task):
    """The other samples are the negatives."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(self(x).mean(1), dim=-1)
        return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))


class PairsApart(InBatch):
    """Samples of one kind are drawn together; of two replicas each has one of each kind, and no pair."""

    def samples(self) -> TensorDataset:
        x, y = tokens(BATCH * 9)
        y[:, 0] = torch.arange(len(y)) % (BATCH // 2)
        return TensorDataset(x, y)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(self(x).mean(1), dim=-1)
        alike = (y[:, 0] == y[:, :1]) & ~torch.eye(len(y), dtype=torch.bool)
        return z.square().mean() + torch.cdist(z, z).square()[alike].sum() / len(y)


class FirstTokens(Task):
    """The layers compute for the first tokens of a batch, more than half of its samples have."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            first = torch.arange(len(x) * LENGTH).view(len(x), LENGTH, 1) < 5 * LENGTH
            return x + self.linear(x).tanh() * first

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FirstTokens.Layer() for _ in range(4))
        self.double()


class Mixed(Task):
    """Each sample is mixed with the next one of the batch."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        mixed = 0.3 * self.embed(x) + 0.7 * self.embed(x.roll(1, 0))
        for layer in self.layers:
            mixed = layer(mixed)
        logits = self.head(mixed).flatten(0, 1)
        return 0.3 * F.cross_entropy(logits, y.flatten()) + 0.7 * F.cross_entropy(logits, y.roll(1, 0).flatten())


class Counted(Rows):
    """Warms up by a counter of its own."""

    calls = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return super().loss(x, y) / self.calls


class Running(Rows):
    """Follows its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 1.0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        self.calls = 0.9 * self.calls + 0.1 * loss.item()
        return loss * self.calls


class Seen(Rows):
    """Counts its samples, which adds up by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += len(x)
        return super().loss(x, y)


class Dropping(Rows):
    drop = 0.5


class Noisy(Task):
    """Draws noise for every sample."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        share = torch.rand(len(x), 1, 1, dtype=logits.dtype)
        return (logits * share - torch.randn_like(logits)).square().mean()


class Vector(Task):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.each(x, y, reduction="none").view_as(y).mean(1)


class Detached(Rows):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y).detach()


class LogsNothing(Rows):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.log("nothing", None)  # type: ignore[arg-type]
        return super().loss(x, y)


class LogsList(Rows):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.log("three", [3])  # type: ignore[arg-type]
        return super().loss(x, y)


class LogsText(Rows):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.log("three", "3")  # type: ignore[arg-type]
        return super().loss(x, y)


class Reduced(Rows):
    """Logs with other ways of combining the values of an epoch's steps."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        self.log("summed", loss, reduce_fx="sum")
        self.log("largest", loss, reduce_fx="max")
        self.log("samples", float(len(x)), reduce_fx="sum")
        self.log("token", x.double().square().mean(), reduce_fx="min")
        return loss


class Conditioned(Task):
    """Statistics of the batch before the layers and behind them; layers take and give two tensors, and write into them;
    the head is the embedding.
    """

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

        def forward(self, x: Tensor, more: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x.relu_() + more) + shift, more

    def __init__(self) -> None:
        super().__init__()
        self.more, self.shift = nn.Linear(8, 8), nn.Parameter(torch.rand(8))
        self.layers = nn.ModuleList(Conditioned.Layer() for _ in range(4))
        self.head.weight = self.embed.weight
        self.calls = 0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.embed(x)
        hidden = (hidden - hidden.mean(0, keepdim=True)).transpose(0, 1).contiguous()
        more = self.more(hidden.mean(0, keepdim=True))
        for layer in self.layers:
            hidden, more = layer(hidden, more, self.shift)
        logits: Tensor = self.head(hidden.relu_().transpose(0, 1)) + more.mean()
        return logits

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.each(x, y).sqrt()
        self.log("perplexity", loss.exp())
        return loss / self.calls


class Between(InBatch):
    """The step keeps the output of a layer that is not the last one."""

    layers_run_apart = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers[:-1]:
            x = layer(x)
        logits: Tensor = self.head(self.layers[-1](x) + x)
        return logits


class AcrossSamples(InBatch):
    """The layers compute over the samples that they see."""

    layers_run_apart = False

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) - x.mean(0)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AcrossSamples.Layer() for _ in range(4))
        self.double()


class Alike(Task):
    """Samples of one class are to be alike; a mean over nothing where two samples are of two classes."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z, kind = F.normalize(self(x).mean(1), dim=-1), torch.arange(len(x)) % 4
        same = (kind[:, None] == kind[None]) & ~torch.eye(len(x), dtype=torch.bool)
        return -(z @ z.T / 0.2).log_softmax(1)[same].mean()


class Fifth(Task):
    """Takes five samples at least."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.each(x, y, reduction="none").view_as(y).sum(1).topk(5).values.mean()


class ByClass(Task):
    """Rare classes count more, which two samples do not show: these are as rare each."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        kind = torch.arange(len(x)) % 3 // 2
        weight = 1.0 / torch.bincount(kind, minlength=2).clamp(min=1)
        return F.cross_entropy(self(x).mean(1)[:, :2], kind, weight=weight.double())


class Flat(AcrossSamples):
    """A loss that is almost nothing at first, whatever the layers give."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        scores = self(x).mean((1, 2))
        return (F.relu(scores - scores.roll(1, 0) - (100.0 if self.calls == 1 else 0.0)).square().mean() + 1e-12).sqrt()

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0


class Followed(Rows):
    """Layers follow the mean of what they see, in buffers that are assigned anew; nobody reads them."""

    layers_run_apart = False

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_buffer("mean", torch.zeros(8, dtype=torch.float64))
            layer.register_forward_hook(self._follow)

    @staticmethod
    def _follow(layer: Any, _: Any, output: Tensor) -> None:
        layer.mean = 0.9 * layer.mean + 0.1 * output.detach().mean((0, 1))


class Normed(InBatch):
    """Batch norm in the layers."""

    layers_run_apart = False

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.append(nn.BatchNorm1d(LENGTH))
        self.double()
        self.example_input_array = torch.zeros(2, LENGTH, dtype=torch.int64)  # no other length passes


class Warming(Rows):
    """Layers count their calls in buffers that are assigned anew, and grow with them."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            layer.register_forward_hook(self._count)

    @staticmethod
    def _count(layer: Any, _: Any, output: Tensor) -> Tensor:
        layer.calls = layer.calls + 1
        return output * (1 - 0.5 / layer.calls)


class Logs(Task):
    """Logs functions of means, over targets and over samples."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        error = (logits.mean(-1) - x / VOCABULARY).square().mean()
        self.log("perplexity", loss.exp())
        self.log("loss of samples", loss, batch_size=len(x))
        self.log_dict(
            {"root": error.sqrt(), "signal": -10 * error.log10(), "spread": x.double().amax(), "norm": logits.norm()}
        )
        self.log("right", (logits.argmax(-1) == y).sum() / (y != -100).sum().double())
        return loss


class LogsOthers(Rows):
    """Logs a ratio that nothing counts, and a number that is the same at first."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        wide = (x > 8).sum()
        self.log("ratio", (x.double().mean() + wide) / (1 + wide))
        self.log("many", wide.double() if self.calls > 1 else 0.0)
        return super().loss(x, y)


class LogsHits(Rows):
    """Logs how many samples begin with token 3, and a function of that which no sum or mean gives."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hits = (x[:, 0] == 3).sum().double()
        self.log("hits", hits)
        self.log("score", hits / (hits + 1))
        return super().loss(x, y)


WEIGHED: dict[str, Callable[[], Task]] = {
    "rows": Rows, "padded": Task, "zero_head": ZeroHead, "late": Late, "shifted": Shifted, "sum": Sum,
    "over_batch_size": OverBatchSize, "counted": Counted, "seen": Seen, "reduced": Reduced, "warming": Warming,
    "logs": Logs, "balanced": Balanced, "rebalanced": Rebalanced, "emptied": Emptied,
}  # fmt: skip
WHOLE: dict[str, Callable[[], Task]] = {
    "root": Root, "hardest": Hardest, "focal": Focal,
    "invariant": Invariant,
    "in_batch": InBatch, "mixed": Mixed,
    "running": Running, "followed": Followed, "conditioned": Conditioned, "between": Between,
    "across_samples": AcrossSamples, "alike": Alike, "fifth": Fifth, "by_class": ByClass, "normed": Normed,
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[[], Task], str]] = {
    "vector": (Vector, r"a loss of shape \(.*,\)"),
    "detached": (Detached, "does not require grad"),
    "logs_nothing": (LogsNothing, r"`self.log\(nothing, None\)` was called, but `NoneType` values cannot be logged"),
    "logs_list": (LogsList, r"`self.log\(three, \[3\]\)` was called, but `list` values cannot be logged"),
    "logs_text": (LogsText, r"`self.log\(three, 3\)` was called, but `str` values cannot be logged"),
}
SAMPLED: dict[str, Callable[[], Task]] = {"unlike": Unlike, "uneven": Uneven, "uneven_rows": UnevenRows, "kinds": Kinds}
