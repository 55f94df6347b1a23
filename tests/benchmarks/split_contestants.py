"""Both sides of the tensor-parallel duels: a step in a whole Trainer, and the loss alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.layers import VocabParallelLogits
from tests.benchmarks.contestants import WARM_UP, Clock, Round, Stopwatch
from tests.benchmarks.model import Size, make_batches
from tests.benchmarks.split_model import DTensorTask, SplittableTask
from tests.harness import RankInfo, ReusedProcesses

RANKS = 2


def _fit(info: RankInfo, size: Size, steps: int, strategy: Any, task: SplittableTask) -> Round:
    watch = Stopwatch(steps)
    trainer = Trainer(
        accelerator="cpu",
        devices=info.world_size,
        strategy=strategy,
        plugins=[ReusedProcesses(info)],
        max_steps=WARM_UP + steps,
        logger=False,
        callbacks=[watch],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=info.directory,
    )
    batches: Any = make_batches(size, WARM_UP + steps, size.batch)
    trainer.fit(task, train_dataloaders=DataLoader(batches, batch_size=None))
    return Round(*watch.result, float(trainer.callback_metrics["train_loss"]))


def our_step(info: RankInfo, size: Size, steps: int, sequence: bool) -> Round:
    """This package, the module unchanged."""
    torch.manual_seed(0)
    strategy = MegatronStrategy(tensor_parallel_size=RANKS, sequence_parallel=sequence)
    return _fit(info, size, steps, strategy, SplittableTask(size))


def dtensor_step(info: RankInfo, size: Size, steps: int, sequence: bool) -> Round:
    """Lightning's ModelParallelStrategy, the module splitting itself."""
    torch.manual_seed(0)
    strategy = ModelParallelStrategy(1, RANKS, process_group_backend="gloo")
    return _fit(info, size, steps, strategy, DTensorTask(size, sequence))


def our_loss(info: RankInfo, size: Size, steps: int) -> Round:
    """`F.cross_entropy` on split logits, forward and backward."""
    group = distributed.group.WORLD
    assert group is not None

    def step(local: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(VocabParallelLogits.wrap(local, group, size.vocabulary), target)
        loss.backward()
        return loss

    return _losses(info, size, steps, step)


def dtensor_loss(info: RankInfo, size: Size, steps: int) -> Round:
    """The same under torch's ``loss_parallel``."""
    mesh = init_device_mesh("cpu", (RANKS,))

    def step(local: Tensor, target: Tensor) -> Tensor:
        with loss_parallel():
            loss = F.cross_entropy(DTensor.from_local(local, mesh, [Shard(-1)], run_check=False), target)
            loss.backward()
        return loss.full_tensor()  # type: ignore[attr-defined]

    return _losses(info, size, steps, step)


def _losses(info: RankInfo, size: Size, steps: int, step: Callable[[Tensor, Tensor], Tensor]) -> Round:
    generator = torch.Generator().manual_seed(0)
    tokens = size.batch * size.sequence
    logits = torch.randn(tokens, size.vocabulary, generator=generator)
    target = torch.randint(0, size.vocabulary, (tokens,), generator=generator)
    local = logits.chunk(RANKS, -1)[info.rank].contiguous().requires_grad_()
    loss, clock = torch.zeros(()), Clock()
    for index in range(WARM_UP + steps):
        clock = Clock() if index == WARM_UP else clock
        local.grad = None
        loss = step(local, target)
    return Round(*clock.per_step(steps), loss.item())


DUELS: dict[str, tuple[Callable[..., Round], Callable[..., Round]]] = {
    "step": (partial(our_step, sequence=False), partial(dtensor_step, sequence=False)),
    "sequence": (partial(our_step, sequence=True), partial(dtensor_step, sequence=True)),
    "loss": (our_loss, dtensor_loss),
}


def duel(info: RankInfo, name: str, size: Size, steps: int, rounds: int) -> list[tuple[Round, Round]]:
    """Alternates the two contestants of ``name``; who goes first alternates too."""
    if not distributed.is_initialized():
        address = f"tcp://127.0.0.1:{info.port}"
        distributed.init_process_group("gloo", init_method=address, rank=info.rank, world_size=info.world_size)
    results = []
    for index in range(rounds):
        pair: list[Any] = [None, None]
        for side in (index % 2, 1 - index % 2):
            pair[side] = DUELS[name][side](info, size, steps)
        results.append((pair[0], pair[1]))
    return results
