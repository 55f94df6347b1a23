"""The GPT of the tensor-parallel duels: separate projections, so that ``parallelize_module`` can split it too."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.benchmarks.model import Size, optimizer_of


class Attention(nn.Module):
    """Causal attention whose heads are counted from its projections; ``[batch, seq, hidden]`` to the same."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_size = size.hidden // size.heads
        self.query, self.key, self.value, self.out = (nn.Linear(size.hidden, size.hidden) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], -1, self.head_size)
        query, key, value = (layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(size.hidden), nn.LayerNorm(size.hidden)
        self.attention = Attention(size)
        self.up, self.down = nn.Linear(size.hidden, 4 * size.hidden), nn.Linear(4 * size.hidden, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class SplittableGPT(nn.Module):
    """Tokens ``[batch, seq]`` to logits ``[batch, seq, vocabulary]``."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.hidden)
        self.layers = nn.ModuleList([Block(size) for _ in range(size.layers)])
        self.norm, self.head = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class SplittableTask(LightningModule):
    """An ordinary LightningModule around it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.net = SplittableGPT(size)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("train_loss", loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return optimizer_of(self)


class DTensorTask(SplittableTask):
    """The same as Lightning's manual has it for ModelParallelStrategy: ``parallelize_module`` and ``loss_parallel``.

    Args:
        size: dimensions.
        sequence: split norms and residuals along the sequence as well.
    """

    def __init__(self, size: Size, sequence: bool) -> None:
        super().__init__(size)
        self.sequence = sequence

    def configure_model(self) -> None:
        mesh = self.device_mesh["tensor_parallel"]
        ends, layer = (_sequence_plans if self.sequence else plain_plans)()
        for block in self.net.layers:
            parallelize_module(block, mesh, layer)
        parallelize_module(self.net, mesh, ends)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with loss_parallel():
            loss = F.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("train_loss", loss.detach().full_tensor())
        return loss

    def backward(self, *args: Any, **kwargs: Any) -> None:
        with loss_parallel():
            super().backward(*args, **kwargs)


PROJECTIONS = ("attention.query", "attention.key", "attention.value")


def plain_plans() -> tuple[dict[str, Any], dict[str, Any]]:
    """``parallelize_module`` plans of the ends of the network and of a block."""
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    layer: dict[str, Any] = {name: ColwiseParallel() for name in PROJECTIONS}
    return ends, {**layer, "attention.out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


def _sequence_plans() -> tuple[dict[str, Any], dict[str, Any]]:
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    layer: dict[str, Any] = {name: ColwiseParallel() for name in PROJECTIONS}
    whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    return ends, {
        **layer,
        **{"norm_1": SequenceParallel(), "norm_2": SequenceParallel()},
        **{"attention": PrepareModuleInput(**whole), "attention.out": RowwiseParallel(output_layouts=Shard(1))},
        **{"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))},
    }
