"""Speed of saving and loading: ours, plain DCP and raw files, the same bytes, alternating in one run.

``python -m tests.benchmarks.checkpoints --megabytes 1024 --rounds 5``. Writes are flushed to the disk by all three;
reads come from the page cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_megatron import MegatronCheckpointIO
from lightning_megatron.mesh.parts.pieces import PiecedTensor
from tests.harness import run_on_mesh

RANKS, TENSORS = 2, 16


def main() -> None:
    """Prints one line per contestant: GB/s over both ranks, median and quartiles, and ratios to the others."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1024, help="per rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write; by default the system's temporary folder")
    options = parser.parse_args()
    compare(options.megabytes, options.rounds, options.folder)


def compare(megabytes: int, rounds: int, where: str | None = None) -> dict[str, Any]:
    """Measures and prints; the record has GB/s of each and the ratios, theirs / ours in seconds."""
    folder = tempfile.mkdtemp(prefix="checkpoints-", dir=where)
    try:
        found = run_on_mesh(measure, megabytes, rounds, folder, data=RANKS, deadline=600.0)[0]
    finally:
        shutil.rmtree(folder)
    gigabytes = RANKS * megabytes * 2**20 / 1e9
    record: dict[str, Any] = {"ranks": RANKS, "megabytes_per_rank": megabytes}
    for what in ("save", "load"):
        ours = found[f"ours {what}"]
        for name in ("raw", "dcp", "ours"):
            seconds = found[f"{name} {what}"]
            speeds = [gigabytes / s for s in sorted(seconds, reverse=True)]
            ratio = statistics.median(theirs / own for theirs, own in zip(seconds, ours, strict=True))
            low, _, high = statistics.quantiles(speeds, n=4)
            median = statistics.median(speeds)
            record[f"{name} {what}"] = {"gb_per_s": round(median, 3), "ours_over_it": round(ratio, 3)}
            print(f"{what} {name:5} {median:5.2f} GB/s ({low:.2f}-{high:.2f}), ours is {ratio:.2f} times that")
    stall, whole = statistics.median(found["stall"]), statistics.median(found["background"])
    record["stall_ms"], record["background_save_ms"] = round(1000 * stall, 1), round(1000 * whole, 1)
    share = 100 * stall / whole
    print(f"asynchronous: the step waits {1000 * stall:.0f} ms, {share:.0f}% of the save's {1000 * whole:.0f} ms")
    return record


def measure(mesh: DeviceMesh, megabytes: int, rounds: int, folder: str) -> dict[str, list[float]]:
    """Seconds of the slower rank, by contestant and round; the first round is thrown away."""
    warnings.filterwarnings("ignore")
    rank = dist.get_rank()
    size = megabytes * 2**20 // 4 // TENSORS
    state = {f"rank{rank}.tensor{i}": torch.randn(size // 1024, 1024) for i in range(TENSORS)}
    io, background = MegatronCheckpointIO(), MegatronCheckpointIO(async_save=True)
    contestants: dict[str, Callable[[], Any]] = {
        "raw save": lambda: _write_raw(state, f"{folder}/raw-{rank}"),
        "raw load": lambda: _read_raw(state, f"{folder}/raw-{rank}"),
        "dcp save": lambda: dcp.save(state, checkpoint_id=f"{folder}/dcp"),
        "dcp load": lambda: dcp.load(state, checkpoint_id=f"{folder}/dcp"),
        "ours save": lambda: io.save_checkpoint({"state_dict": state}, f"{folder}/ours.ckpt"),
        "ours load": lambda: io.load_tensors(f"{folder}/ours.ckpt", _pieces(state)),
        "stall": lambda: background.save_checkpoint({"state_dict": state}, f"{folder}/background.ckpt"),
    }
    found: dict[str, list[float]] = {name: [] for name in (*contestants, "background")}
    for _ in range(rounds + 1):
        for name, action in contestants.items():
            if not name.endswith("load"):
                _clean(folder, rank)
            found[name].append(_slower(action))
            if name == "stall":
                found["background"].append(found[name][-1] + _slower(background.wait))
    return {name: seconds[1:] for name, seconds in found.items()}


def _slower(action: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    action()
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _clean(folder: str, rank: int) -> None:
    """Every save begins without files of its own, and with nothing of others left to flush."""
    dist.barrier()
    if rank == 0:
        for path in Path(folder).iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()
    dist.barrier()


def _write_raw(state: dict[str, Tensor], path: str) -> None:
    with open(path, "wb") as file:
        for tensor in state.values():
            file.write(tensor.numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _read_raw(state: dict[str, Tensor], path: str) -> None:
    with open(path, "rb") as file:
        for tensor in state.values():
            file.readinto(tensor.numpy().data)


def _pieces(state: dict[str, Tensor]) -> dict[str, tuple[str, PiecedTensor]]:
    return {name: (name, PiecedTensor.whole(tensor)) for name, tensor in state.items()}


if __name__ == "__main__":
    from tests.benchmarks.checkpoints import main as by_name  # workers import what they run by name

    by_name()
