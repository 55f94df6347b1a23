"""Puts a worker back as it was before a job, so that the order of tests cannot matter."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import warnings
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import distributed

from lightning_megatron.mesh.messages import host_peers
from tests.harness.device import be_a_machine
from tests.harness.filters import apply_filters

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


@dataclass(frozen=True)
class Pristine:
    """Everything process-wide that a Trainer or a test may have changed."""

    environ: dict[str, str]
    directory: str
    handlers: dict[int, Any]
    log_levels: dict[str, int]

    @classmethod
    def capture(cls) -> Pristine:
        return cls(
            environ=dict(os.environ),
            directory=os.getcwd(),
            handlers={number: signal.getsignal(number) for number in _SIGNALS},
            log_levels={name: logging.getLogger(name).level for name in _library_loggers()},
        )

    def restore(self) -> None:
        """Undoes a job; the process group goes last, when every rank has said that it is done with it."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        for name, level in self.log_levels.items():
            logging.getLogger(name).setLevel(level)
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(self.directory)
        rank_zero_only.rank = 0
        gc.collect()
        host_peers.close_peers()
        if distributed.is_initialized():
            distributed.destroy_process_group()
        _reset_torch()
        warnings.resetwarnings()


def prepare(rank: int, directory: str) -> None:
    """Makes the start of a job the same whatever ran before it on this worker."""
    apply_filters()
    _reset_torch()
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    os.chdir(directory)
    be_a_machine()
    rank_zero_only.rank = rank


def _reset_torch() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)


def _library_loggers() -> tuple[str, ...]:
    return ("", "lightning", "lightning.pytorch", "lightning.fabric", "lightning_megatron", "torch", "transformers")
