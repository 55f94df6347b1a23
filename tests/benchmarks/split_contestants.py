"""Both sides of the tensor-parallel duels: a step in a whole Trainer, and the loss alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from lightning_megatron import MegatronStrategy
from lightning_megatron.layers import VocabParallelLogits
from tests.benchmarks.contestants import WARM_UP, Clock, Round, alternate, ensure_group, trainer_round
from tests.benchmarks.model import Size
from tests.benchmarks.split_model import DTensorTask, SplittableTask
from tests.harness import RankInfo

RANKS = 2


def our_step(info: RankInfo, size: Size, steps: int, sequence: bool) -> Round:
    """This package, the module unchanged."""
    strategy = MegatronStrategy(tensor_parallel_size=RANKS, sequence_parallel=sequence)
    return trainer_round(info, size, steps, strategy, size.batch, SplittableTask)


def dtensor_step(info: RankInfo, size: Size, steps: int, sequence: bool) -> Round:
    """Lightning's ModelParallelStrategy, the module splitting itself."""
    strategy = ModelParallelStrategy(1, RANKS, process_group_backend="gloo")
    return trainer_round(info, size, steps, strategy, size.batch, partial(DTensorTask, sequence=sequence))


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
    """Alternates the two contestants of ``name``."""
    ensure_group(info)
    ours, theirs = DUELS[name]
    return alternate(lambda: ours(info, size, steps), lambda: theirs(info, size, steps), rounds)
