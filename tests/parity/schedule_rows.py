"""Rows of the schedules' own parity table: which schedule, cut how, trained how, against one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_megatron import MegatronStrategy
from lightning_megatron.pipeline.forwards.stack import ForwardSlot, ForwardStack
from tests.harness import RankInfo, run_trainers
from tests.harness.links import linked
from tests.harness.remember import remembered
from tests.parity.compare import compare
from tests.parity.row import CLIPS, STEPS
from tests.parity.train import Recorder, Trace, local_weights, make_trainer
from tests.parity.zoo.blocks import HIDDEN
from tests.parity.zoo.data import VOCABULARY
from tests.parity.zoo.language import NanoGPT, TorchLayers
from tests.parity.zoo.tasks import MaskedTask, OwnLossTask, TokenTask

LAYERS = 8


class DropoutBlock(nn.Module):
    """Attention by torch's fused function, with dropout everywhere a transformer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN), nn.Dropout())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = self.qkv(self.norm(x)).view(batch, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        dropout = 0.3 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)), 0.2, self.training)
        return x + self.mlp(x)


class DropoutNet(nn.Module):
    """A stack of them, between an embedding that is normed by its batch and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([DropoutBlock() for _ in range(LAYERS)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embed(tokens), 0.1, self.training)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class SharedInside(nn.Module):
    """Layers that use one linear twice, and one weight by a call and by a function; a list of bare linears between."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.free = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.twice(torch.tanh(self.twice(x)))
        return x + self.free(torch.relu(F.linear(x, self.free.weight)))


class TiedLayers(nn.Module):
    """Layers on different stages and chunks share a weight; the last one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.layers = nn.ModuleList([SharedInside() for _ in range(LAYERS)])
        self.layers[4].twice.weight = self.layers[0].twice.weight
        self.layers[7].free.weight = self.layers[6].free.weight
        self.layers[7].twice.requires_grad_(False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class LinearLayers(nn.Module):
    """The layers themselves are linears, the first with a bare parameter before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.shift = nn.Embedding(VOCABULARY, HIDDEN), nn.Parameter(torch.randn(HIDDEN))
        self.layers = nn.Sequential(*[nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embed(tokens) + self.shift)))


MODULES: dict[str, Callable[[int], LightningModule]] = {
    "tied": lambda layers: OwnLossTask(NanoGPT(layers)),
    "torch": lambda layers: MaskedTask(TorchLayers(layers)),
    "shared": lambda _: TokenTask(TiedLayers()),
    "linears": lambda _: TokenTask(LinearLayers()),
    "dropout": lambda _: TokenTask(DropoutNet()),
}


def one_by_one(stages: int, chunks: int, micro_batches: int) -> list[list[str]]:
    """A user's schedule: one micro-batch at a time, the first backwards whole and the others split."""
    steps = []
    for _ in range(stages):
        down = [f"F{{0}}.{chunk}" for chunk in range(chunks)]
        up = [f"{{1}}{{0}}.{chunk}" for chunk in reversed(range(chunks))]
        own = []
        for index in range(micro_batches):
            own += [step.format(index) for step in down]
            own += [step.format(index, "B" if index == 0 else "I") for step in up]
        own += [f"W{index}.{chunk}" for index in range(1, micro_batches) for chunk in range(chunks)]
        steps.append(own)
    return steps


FUNCTIONS: dict[str, Any] = {"one_by_one": one_by_one}


@dataclass(frozen=True)
class ScheduleRow:
    """A training run.

    Attributes:
        schedule: name, or key of `FUNCTIONS`.
        stages: pipeline stages; 0 for the plain one-process Trainer.
        replicas: data-parallel replicas.
        tensor: tensor-parallel size.
        layers: of the module; fewer for rows over four ranks and more, which cost most.
        micro_batch: samples per micro-batch and replica; batches have 8 samples, the last of an epoch 4.
        recompute: ``activation_recompute``, as text.
        others: further arguments of the strategy, as text.
    """

    schedule: str
    stages: int = 2
    virtual: int | None = None
    micro_batch: int = 2
    replicas: int = 1
    tensor: int = 1
    module: str = "tied"
    clip: str = "norm"
    accumulate: int = 1
    recompute: str = "None"
    others: str = "{}"
    layers: int = LAYERS

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return STEPS[self.accumulate]

    @property
    def devices(self) -> int:
        return max(1, self.stages * self.replicas * self.tensor)

    @property
    def reference(self) -> ScheduleRow:
        """The same training on one process: plain, or with dropout cut into the same micro-batches."""
        plain = replace(
            self, stages=0, replicas=1, tensor=1, virtual=None, schedule="1f1b", recompute="None", others="{}"
        )
        return replace(plain, stages=1) if self.module == "dropout" else replace(plain, micro_batch=0)

    def __str__(self) -> str:
        virtual = "" if self.virtual is None else f"-v{self.virtual}"
        recompute = "" if self.recompute == "None" else f"-{self.recompute}"
        layout = f"pp{self.stages}" + ("" if self.replicas == 1 else f"xdp{self.replicas}")
        layout += "" if self.tensor == 1 else f"xtp{self.tensor}"
        rest = "" if self.others == "{}" else f"-{self.others}"
        return (
            f"{self.schedule}-{layout}{virtual}-mb{self.micro_batch}-{self.module}-{self.clip}-acc{self.accumulate}"
            f"{recompute}{rest}"
        )


def strategy_of(row: ScheduleRow) -> Any:
    """The strategy that a row asks for."""
    if row.stages == 0:
        return "auto"
    strategy = MegatronStrategy(
        pipeline_parallel_size=row.stages,
        data_parallel_size=row.replicas,
        tensor_parallel_size=row.tensor,
        micro_batch_size=row.micro_batch,
        pipeline_schedule=FUNCTIONS.get(row.schedule, row.schedule),
        virtual_pipeline_parallel_size=row.virtual,
        activation_recompute=eval(row.recompute),
        bucket_size_mb=0.002,
        **eval(row.others),
    )
    return linked(strategy, scatter_from=1, through_memory=row.micro_batch % 2 == 0)


def train_row(info: RankInfo, row: ScheduleRow) -> Trace:
    """Fits the row's module, with validation and a checkpoint, and returns what this rank saw.

    Small tensors travel in parts too; messages through memory, as on one host, or, for odd micro-batches, over gloo.
    """
    trace, clip = Trace(), CLIPS[row.clip]
    best = ModelCheckpoint(dirpath=Path(info.directory) / "best", monitor="val_loss", save_top_k=1)
    trainer: Trainer = make_trainer(
        info,
        strategy_of(row),
        max_steps=row.steps,
        accumulate_grad_batches=row.accumulate,
        gradient_clip_val=clip[0] if clip else None,
        gradient_clip_algorithm=clip[1] if clip else None,
        enable_checkpointing=True,
        num_sanity_val_steps=1,
        callbacks=[Recorder(trace), best],
    )
    torch.manual_seed(7)
    module = MODULES[row.module](row.layers)
    trainer.fit(module)
    whole = trainer.strategy.full_state_dict() if row.tensor > 1 else None  # type: ignore[attr-defined]
    trace.weights, trace.steps = local_weights(module) if whole is None else whole, trainer.global_step
    trace.best_name = Path(best.best_model_path).name
    trace.best_score = float("nan") if best.best_model_score is None else float(best.best_model_score)
    leftovers = [
        name for name, child in module.named_modules() if ForwardStack.of(child).get(ForwardSlot.SPLIT) is not None
    ]
    assert not leftovers, leftovers
    return trace


@remembered
def reference(row: ScheduleRow) -> Trace:
    """The one-process run, made once."""
    trace: Trace = run_trainers(train_row, row, devices=1)[0].value
    return trace


def check_row(row: ScheduleRow) -> None:
    """Runs ``row`` and its reference.

    Raises:
        AssertionError: listing every difference beyond 1e-9.
    """
    outcomes = run_trainers(train_row, row, devices=row.devices, deadline=120.0, grace=20.0)
    traces = [outcome.value for outcome in outcomes]
    found = list(compare(traces, reference(row.reference), 1e-9))
    assert not found, f"{row}: {len(found)} differences\n" + "\n".join(found[:12])
