"""A small GPT in real training, with everything written down that a rehearsal reports."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron import MegatronStrategy
from lightning_megatron.mesh.messages import exchange
from lightning_megatron.planner import Cluster, ModelShape, Recipe
from lightning_megatron.planner.cost.memory import Memory, stage_memory
from lightning_megatron.strategy.activations.host_budget import Host
from lightning_megatron.tools.rehearsal.meter import MemoryMeter, Metered
from lightning_megatron.tools.rehearsal.one_rank import OneBatch, Witness
from lightning_megatron.tools.rehearsal.paper import Ledger
from lightning_megatron.tools.rehearsal.paper_host import PaperHost
from tests.harness import RankInfo, ReusedProcesses
from tests.harness.links import linked

VOCABULARY, SEQUENCE, LAYERS, HIDDEN, HEADS = 256, 32, 4, 64, 4


class Block(nn.Module):
    """One pre-norm layer. x: [batch, seq, hidden] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.output = nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first(x)
        heads = (part(normed).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for part in self.parts())
        x = x + self.output(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))

    def parts(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.query, self.key, self.value


class SmallGPT(LightningModule):
    """Next-token prediction; embedding and head are tied."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        tokens, targets = batch
        loss = F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def build() -> tuple[SmallGPT, tuple[Tensor, Tensor]]:
    """The module and eight samples for one replica."""
    tokens = torch.arange(8 * SEQUENCE).view(8, SEQUENCE) % VOCABULARY
    return SmallGPT(), (tokens, tokens.roll(-1, 1))


class MlpBlock(Block):
    """The same with its MLP in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(self.up, nn.GELU(), self.down)
        del self.up, self.down

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first(x)
        heads = (part(normed).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for part in self.parts())
        x = x + self.output(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


def with_mlps() -> tuple[SmallGPT, tuple[Tensor, Tensor]]:
    """The same with layers whose MLP is a module."""
    module, batch = build()
    module.blocks = nn.ModuleList(MlpBlock() for _ in range(LAYERS))
    return module, batch


OPERATIONS = {
    "allreduce_": "all-reduce",
    "broadcast_": "broadcast",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "reduce-scatter",  # gradient buckets on gloo: blocks are exchanged, and added up locally
    "barrier": "barrier",
    "send": "send",
    "recv_": "receive",
}


class Overheard(TorchDispatchMode):
    """Writes every operation of torch's process groups into a ledger.

    As in a launch on many nodes, collectives are no messages between the few ranks here; strategies under it need
    ``linked(..., through_memory=False)``, so that stages send through the process group too.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger
        self._as_on_many_nodes = ExitStack()

    def __enter__(self) -> Any:
        self._as_on_many_nodes.enter_context(mock.patch.object(exchange, "exchanges", lambda *_, **__: False))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._as_on_many_nodes.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._note(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: Any) -> None:
        operation = OPERATIONS[name]
        group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        whole = args[1] if OPERATIONS[name] == "reduce-scatter" else args[0]
        tensors = [] if name == "barrier" else torch.utils._pytree.tree_leaves(whole)
        self.ledger.write(group, operation, tensors, args[2] if name in ("send", "recv_") else -1)


class ApartHost(PaperHost):
    """A host that has so much memory, which is told from the device's."""

    stages = Host.stages


def live(
    info: RankInfo, settings: dict[str, Any], made: Callable[[], Any] = build, host_gib: float | None = None
) -> dict[str, Any]:
    """One real step of what ``made`` returns, with these arguments of the strategy; a rehearsal should have said it."""
    meter, ledger = MemoryMeter(), Ledger()
    with Metered(meter), Overheard(ledger):
        module, batch = made()
        witness = Witness(ledger, meter)
        strategy = MegatronStrategy(**settings, whole_batch_loss=False)
        linked(strategy, ApartHost(host_gib), through_memory=False)
        trainer = Trainer(
            accelerator="cpu",
            devices=info.world_size,
            strategy=strategy,
            plugins=[ReusedProcesses(info)],
            callbacks=[witness.moments],
            max_steps=1,
            limit_val_batches=0,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, OneBatch(batch))
    schedules = witness.found["schedules"]
    steps = [s.instructions[strategy.mesh.stage] for (_, forward_only), s in schedules.items() if not forward_only]
    return {
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "tensors": len(list(module.parameters())),
        "bytes": dict(witness.found["bytes_by_kind"]),
        "instructions": tuple(str(step) for step in steps[-1]) if strategy.mesh.layout.pipeline > 1 else (),
        "communication": {tuple(entry): count for entry, count in ledger.counts.items()},
    }


def planned(settings: dict[str, Any], ranks: int, stage: int) -> Memory:
    """What the planner says that a rank of ``stage`` holds in one step of :func:`build`, in 32 bits."""
    tensor, pipeline = (settings.get(f"{axis}_parallel_size", 1) for axis in ("tensor", "pipeline"))
    schedule, recompute = settings.get("pipeline_schedule", "1f1b"), settings.get("activation_recompute", "none")
    recipe = Recipe(
        tensor=tensor,
        pipeline=pipeline,
        data=ranks // tensor // pipeline,
        micro_batch=settings["micro_batch_size"],
        global_batch=8 * ranks // tensor // pipeline,
        schedule=schedule,
        chunks=2 if schedule == "interleaved" else 1,
        sequence_parallel=False,
        recompute=recompute,
        precision="fp32",
    )
    shape = ModelShape(LAYERS, HIDDEN, HEADS, VOCABULARY, SEQUENCE, positions=SEQUENCE)
    return stage_memory(shape, recipe, Cluster.named("A100"), stage, float(recompute == "full"))
