"""What the Trainers of tests run on: CPU processes over gloo or, with ``pytest --gpu``, one GPU over NCCL.

NCCL lets no two ranks of one machine share a GPU. Each rank here says that it is a machine of its own, with one
device, so that any layout runs on one GPU, slowly, through everything that a run on many has: its own CUDA context and
streams, NCCL's communicators and kernels.
"""

from __future__ import annotations

import os
from typing import Any

import torch

_SWITCH = "TESTS_ON_GPU"
"""Environment variable, which the worker processes inherit."""


def use_gpu() -> None:
    """Lets all Trainers of this test session run on the GPU.

    Raises:
        RuntimeError: torch sees none.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asked otherwise, CUDA starts, and no fork can use it any more
    if not torch.cuda.device_count():
        raise RuntimeError("`--gpu` runs tests on a GPU, and torch sees none here; leave it out for the CPU.")
    os.environ[_SWITCH] = "1"


def on_gpu() -> bool:
    """Whether this test session runs on the GPU."""
    return os.environ.get(_SWITCH) == "1"


def trainer_devices(world: int) -> dict[str, Any]:
    """Arguments of a Trainer that runs on as many ranks."""
    if on_gpu():
        return {"accelerator": "gpu", "devices": 1, "num_nodes": world}
    return {"accelerator": "cpu", "devices": world}


def be_a_machine() -> None:
    """Tells NCCL, before it starts, that this process is on a machine of its own, reached over loopback."""
    if on_gpu():
        os.environ |= {"NCCL_HOSTID": f"process{os.getpid()}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
        torch.cuda.set_device(0)
