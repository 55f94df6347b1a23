"""Replicas of the small GPT under this strategy and its peers: step time and bytes held, in one run.

``python -m tests.benchmarks.replicas --replicas 2`` alternates the contestants in the same processes. Bytes are those
of all tensors, counted in a run of its own after every operation, activations included. The most is reported of the
measured steps and, apart, of those before, in some of which this strategy also tries the step on parts of batches.
DDP's buckets, 4 bytes per parameter, are made where no operation is seen, and are added.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_megatron import MegatronStrategy
from tests.benchmarks.contestants import WARM_UP, Round, trainer_round
from tests.benchmarks.model import Size, Task
from tests.harness import RankInfo, run_job


class ZeroTask(Task):
    """The task with torch's ZeroRedundancyOptimizer."""

    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(self.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)


class ShardedTask(Task):
    """The task under FSDP2: every block a unit, weights kept between forward and backward."""

    frees = False

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.net.layers:
            fully_shard(block, mesh=mesh, reshard_after_forward=self.frees)
        fully_shard(self.net, mesh=mesh, reshard_after_forward=self.frees)


class FreedTask(ShardedTask):
    """The same with weights freed behind every block, and gathered anew for its backward."""

    frees = True


def _ours(replicas: int, **options: Any) -> Callable[[], Any]:
    return lambda: MegatronStrategy(data_parallel_size=replicas, **options)


def contestants(replicas: int) -> dict[str, tuple[Callable[[], Any], type[Task]]]:
    """Strategy and task of each, by name."""
    return {
        "ours": (_ours(replicas), Task),
        "ours, not shared": (_ours(replicas, optimizer_sharding=False), Task),
        "ours, weights": (_ours(replicas, weight_sharding=True), Task),
        "ours, to the end": (_ours(replicas, weight_sharding={"free": "step"}), Task),
        "DDP": (lambda: DDPStrategy(process_group_backend="gloo"), Task),
        "DDP + Zero": (lambda: DDPStrategy(process_group_backend="gloo"), ZeroTask),
        "FSDP2": (_fsdp(replicas), ShardedTask),
        "FSDP2, freed": (_fsdp(replicas), FreedTask),
    }


def _fsdp(replicas: int) -> Callable[[], Any]:
    sizes = {"data_parallel_size": replicas, "tensor_parallel_size": 1}
    return lambda: ModelParallelStrategy(**sizes, process_group_backend="gloo")


RIVALS = {"ours, weights": "FSDP2, freed", "ours, to the end": "FSDP2"}
"""Contestants that hold the same weights at the same times; the others are compared with "ours"."""


class StepBytes(TorchDispatchMode):
    """The most bytes of tensors in each step: of all that an operation has returned, until the last tensor on it goes.

    Tensors that only autograd or a kernel's bucket holds count, and memory that was resized counts as it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, Any] = {}
        self.step, self.most = -1, dict[int, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  #: the operations on the tensors inside of it come here again
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and type(leaf) not in (FakeTensor, DTensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                key = storage._cdata
                if key not in self._storages:
                    self._storages[key] = weakref.ref(storage, partial(self._gone, key))
        live = (storage() for storage in list(self._storages.values()))
        now = sum(storage.nbytes() for storage in live if storage is not None)
        self.most[self.step] = max(self.most.get(self.step, 0), now)
        return result

    def _gone(self, key: int, _: Any) -> None:
        self._storages.pop(key, None)


class CountSteps(Callback):
    """Tells a meter which step it is in, and collects garbage, so that none is charged for cycles of references."""

    def __init__(self, meter: StepBytes) -> None:
        self.meter = meter

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        gc.collect()
        self.meter.step = batch_idx


def compete(
    info: RankInfo, size: Size, steps: int, rounds: int, only: list[str] | None = None
) -> dict[str, list[Round]]:
    """All contestants in turn, the first one of a round changing."""
    results: dict[str, list[Round]] = {}
    entries = [(name, given) for name, given in contestants(info.world_size).items() if not only or name in only]
    for index in range(rounds):
        for name, (strategy, task) in entries[index % len(entries) :] + entries[: index % len(entries)]:
            gc.collect()  # Trainers lie in cycles: else rounds are measured beside the tensors of those before
            results.setdefault(name, []).append(
                trainer_round(info, size, steps, strategy(), size.batch // info.world_size, task)
            )
    return results


def memory(info: RankInfo, size: Size, name: str) -> tuple[int, int]:
    """Bytes held by one contestant, at the most: in a measured step, and in one before."""
    strategy, task = contestants(info.world_size)[name]
    gc.collect()  # what earlier jobs of this process have left behind
    with StepBytes() as meter:
        trainer_round(info, size, 2, strategy(), size.batch // info.world_size, task, [CountSteps(meter)])
    steps = meter.most.items()
    return max(most for step, most in steps if step >= WARM_UP), max(most for step, most in steps if step < WARM_UP)


def main() -> None:
    """Prints a table; ratios are ours / theirs, round by round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--only", help="names, separated by semicolons; all by default")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    size, replicas = Size(hidden=arguments.hidden), arguments.replicas
    only = arguments.only.split(";") if arguments.only else list(contestants(replicas))
    ranks = [o.value for o in run_job(compete, replicas, size, arguments.steps, arguments.rounds, only, deadline=900.0)]
    task = Task(size)
    parameters = sum(parameter.numel() for parameter in task.parameters() if isinstance(parameter, nn.Parameter))
    report: dict[str, Any] = {"replicas": replicas, "parameters": parameters, "contestants": {}}
    for name in only:
        rival = {theirs: ours for ours, theirs in RIVALS.items()}.get(name, "ours")
        rival = rival if rival in only else only[0]
        held, before = map(
            max, zip(*(o.value for o in run_job(memory, replicas, size, name, deadline=300.0)), strict=True)
        )
        more = 4 * parameters if name.startswith("DDP") else 0
        held, before = held + more, before + more
        line: dict[str, Any] = {"ours": rival, "bytes": held, "bytes_per_parameter": held / parameters}
        line["bytes_per_parameter_before"] = before / parameters
        for measure, combine in (("seconds", max), ("cpu", sum)):
            own, theirs = (
                [combine(getattr(rank[who][i], measure) for rank in ranks) for i in range(arguments.rounds)]
                for who in (rival, name)
            )
            line[measure] = statistics.median(theirs)
            line[f"{measure}_ratio"] = statistics.median(a / b for a, b in zip(own, theirs, strict=True))
        report["contestants"][name] = line
        print(
            f"{name:18s} {line['seconds'] * 1e3:8.1f} ms ({rival} / this {line['seconds_ratio']:.3f})  "
            f"cpu {line['cpu'] * 1e3:8.1f} ms ({line['cpu_ratio']:.3f})  {line['bytes_per_parameter']:.1f} B/parameter "
            f"({before / parameters:.1f} before)"
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    from tests.benchmarks import replicas  # workers import what they run by name

    replicas.main()
