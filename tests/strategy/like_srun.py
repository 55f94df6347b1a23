"""Starts tasks as ``srun`` does, as far as a script can tell: ``python like_srun.py TASKS SCRIPT [ARGUMENT ...]``."""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def main(tasks: int, command: list[str]) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NNODES": "1",
        "SLURM_NTASKS": str(tasks),
        "SLURM_NTASKS_PER_NODE": str(tasks),
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    running = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **job, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
        )
        for task in range(tasks)
    ]
    return max(abs(process.wait()) for process in running)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
