"""Imported once by the process that workers are forked from, so that a fresh worker costs milliseconds, not seconds."""

import lightning.pytorch  # noqa: F401
import torch
import torch.distributed.checkpoint
import torch.distributed.device_mesh
import torchmetrics  # noqa: F401

import tests.harness.state
import tests.harness.worker  # noqa: F401

torch.set_num_threads(1)
