"""One GPU, a Llama of 1 to 8 billion weights: tokens per second, MFU and memory, ours and the peers' in turn.

Every turn is a process of its own, so that nobody inherits another's memory or compiled code. MFU counts model FLOPs
(``DecoderConfig.flops_per_token``: six per matrix weight and the whole score matrix of attention, recomputation not
counted) against the datasheet's dense bf16 peak.

``python -m tests.benchmarks --suite gpu [--only ours-compiled,lightning-compiled] [--model 8b] [--sequence 8192]``
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from typing import Any

import torch

from tests.benchmarks import report
from tests.benchmarks.gpu_contestants import CONTESTANTS, Workload

PEAKS = {"H200": 989.4e12, "H100 PCIe": 756e12, "H100": 989.4e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
"""Dense bf16 FLOP/s by what the device's name holds, first match (NVIDIA's datasheets)."""

DEADLINE = 900.0


def peak_of(device: str) -> float | None:
    """Datasheet peak of a device by its name; None where it is not listed."""
    return next((peak for name, peak in PEAKS.items() if all(word in device for word in name.split())), None)


def turn(name: str, workload: Workload) -> dict[str, Any]:
    """One contestant in a process of its own.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    command = [sys.executable, "-m", "tests.benchmarks.gpu_contestants", name, json.dumps(vars(workload))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, start_new_session=True)
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    peak = peak_of(found["device"])
    rate = workload.flops / found["seconds"]
    return {**found, "tflops": rate / 1e12, "mfu": None if peak is None else rate / peak}


def main(arguments: argparse.Namespace) -> None:
    """Runs the contestants asked for in turn, and prints medians."""
    if not torch.cuda.is_available() and not arguments.tiny:
        sys.exit("no GPU is visible to torch; `--tiny` tries the script on the CPU with a model of no use.")
    workload = Workload.tiny() if arguments.tiny else Workload(arguments.model, arguments.sequence, arguments.batch)
    chosen = arguments.only.split(",") if arguments.only else list(CONTESTANTS)
    unknown = [name for name in chosen if name not in CONTESTANTS]
    if unknown:
        sys.exit(f"no contestant is named {unknown[0]!r}; there are {', '.join(CONTESTANTS)}.")
    if importlib.util.find_spec("accelerate") is None:
        print("left out for want of the package `accelerate`: Hugging Face's Trainer")
        chosen = [name for name in chosen if not name.startswith("hugging-face")]
    entry: dict[str, Any] = {**report.machine(), "workload": vars(workload), "results": {}}
    print({key: value for key, value in entry.items() if key != "results"})
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    for _ in range(min(arguments.rounds, 3)):
        for name in chosen:
            turns[name].append(turn(name, workload))
    for name, found in turns.items():
        seconds = statistics.median(one["seconds"] for one in found)
        best = min(found, key=lambda one: one["seconds"])
        entry["results"][name] = {"turns": found, "seconds": seconds}
        mfu = "" if best["mfu"] is None else f"  MFU {best['mfu']:.1%}"
        print(
            f"{name:20s} {seconds * 1e3:9.1f} ms per step  {workload.tokens / seconds:10.0f} tokens/s  "
            f"{best['tflops']:7.1f} TFLOP/s{mfu}  {best['peak_bytes'] / 2**30:6.2f} GiB  loss {best['loss']:.4f}",
            flush=True,
        )
    if not arguments.forget:
        report.keep(entry)
