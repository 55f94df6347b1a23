"""Imported once by the process that workers are forked from, so that a fresh worker costs milliseconds, not seconds.

What is imported here stays for the whole session and is frozen: every collection of garbage (one after each job, in
each worker) would otherwise walk through the hundreds of thousands of objects that torch and Lightning consist of.
"""

import gc

import lightning.pytorch  # noqa: F401
import torch
import torch.distributed.checkpoint
import torch.distributed.device_mesh
import torchmetrics  # noqa: F401
import transformers.modeling_utils  # noqa: F401

import tests.harness.state
import tests.harness.worker
import tests.parity.compare
import tests.parity.zoo.registry  # noqa: F401

torch.set_num_threads(1)
gc.collect()
gc.freeze()
