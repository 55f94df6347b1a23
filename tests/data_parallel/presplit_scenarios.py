"""A LightningModule written for Lightning's ModelParallelStrategy: it splits itself in ``configure_model``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_megatron import MegatronStrategy
from tests.harness import RankInfo
from tests.parity.train import Recorder, Trace, make_trainer
from tests.parity.zoo.data import VOCABULARY
from tests.parity.zoo.tasks import TokenTask

WIDTH, HEADS = 16, 4


class SeparateAttention(nn.Module):
    """Causal attention with projections of their own, heads counted from their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], -1, WIDTH // HEADS)
        query, key, value = (layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        with sdpa_kernel(SDPBackend.MATH):
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class SplitBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = SeparateAttention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class SplitGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList([SplitBlock() for _ in range(2)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PLAIN = {
    **{f"attention.{name}": ColwiseParallel for name in ("query", "key", "value")},
    "attention.out": RowwiseParallel,
    "up": ColwiseParallel,
    "down": RowwiseParallel,
}


def _plan(sequence: bool) -> dict[str, Any]:
    if not sequence:
        return {name: style() for name, style in PLAIN.items()}
    gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    scattered = RowwiseParallel(output_layouts=Shard(1), use_local_output=True)
    return {
        **{name: style() for name, style in PLAIN.items()},
        **{"norm_1": SequenceParallel(use_local_output=True), "norm_2": SequenceParallel(use_local_output=True)},
        **{"attention": gathered, "attention.out": scattered},
        **{"up": ColwiseParallel(input_layouts=Shard(1)), "down": scattered},
    }


class SelfSplit(TokenTask):
    """Splits its layers over ``self.device_mesh`` where there is one.

    Args:
        sequence: split norms and residuals along the sequence as well, as torch's tutorial does.
        shard: wrap the layers, but not embedding and head, with ``fully_shard`` over the data axis.
    """

    def __init__(self, sequence: bool = False, shard: bool = False) -> None:
        super().__init__()
        self.sequence, self.shard = sequence, shard

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        self.net = SplitGPT().double()
        if self.device_mesh is None:
            return
        mesh = self.device_mesh["tensor_parallel"]
        for layer in self.net.layers:
            parallelize_module(layer, mesh, _plan(self.sequence))
        if self.sequence:
            ends = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
            ends |= {"head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
            parallelize_module(self.net, mesh, ends)
        if self.shard:
            from torch.distributed.fsdp import fully_shard

            for layer in self.net.layers:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=False, eps=1e-6)


def fit(info: RankInfo, sizes: tuple[int, int] | None, kind: dict[str, Any], seed: bool, others: dict[str, Any]) -> Any:
    """Trains it on ``sizes`` (tensor, data) ranks, or on one process; whole weights as DTensors give them."""
    trace = Trace()
    torch.manual_seed(7 if seed else 7 + info.rank)
    strategy: Any = "auto"
    if sizes is not None:
        strategy = MegatronStrategy(tensor_parallel_size=sizes[0], data_parallel_size=sizes[1], **others)
    trainer: Trainer = make_trainer(
        info,
        strategy,
        max_steps=6,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        num_sanity_val_steps=1,
        callbacks=[Recorder(trace)],
    )
    module = SelfSplit(**kind)
    trainer.fit(module)
    trace.steps = trainer.global_step
    for name, parameter in module.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        trace.weights[name] = whole.detach().clone()
    return trace
