"""From ``python`` to the end of the first step, by Lightning's own launcher: ours and DDPStrategy's.

Run as a script it is one such start, which imports what its strategy needs; :func:`start` times it from outside,
children included.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.benchmarks.contestants import Round

DEADLINE = 180.0


def start(strategy: str, devices: int = 2) -> Round:
    """One cold start; wall and processor seconds of all processes.

    Raises:
        RuntimeError: the run failed; with its output.
    """
    from tests.benchmarks.contestants import Round

    before, began = _children(), time.perf_counter()
    command = [sys.executable, "-m", "tests.benchmarks.start_up", strategy, str(devices)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, start_new_session=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return Round(time.perf_counter() - began, _children() - before, float(done.stdout.split()[-1]))


def _children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def compare(rounds: int) -> list[list[tuple[Round, Round]]]:
    """Rounds of (ours, DDPStrategy) in turn, in the form that a duel of one rank gives."""
    return [[(start("ours"), start("ddp")) for _ in range(rounds)]]


def _main(strategy: str, devices: int) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader

    from tests.benchmarks.model import Size, Task, make_batches

    if strategy == "ours":
        from lightning_megatron import MegatronStrategy

        chosen: Any = MegatronStrategy(data_parallel_size=devices)
    else:
        chosen = DDPStrategy(process_group_backend="gloo")
    size = Size()
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=chosen,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Task(size), DataLoader(make_batches(size, 1, size.batch), batch_size=None))  # type: ignore[arg-type]
    if trainer.is_global_zero:
        print(float(trainer.callback_metrics["train_loss"]))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _main(sys.argv[1], int(sys.argv[2]))
