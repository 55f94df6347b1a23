"""Imported once by the process that workers are forked from, so that a fresh worker costs milliseconds, not seconds.

Every job that fails on purpose ends its workers, so a session starts hundreds of them. What is imported here stays for
the whole session and is frozen: every collection of garbage (one after each job, in each worker) would otherwise walk
through the hundreds of thousands of objects that torch and Lightning consist of. Tests of what an import does start a
process of their own.
"""

import gc
import importlib
import pkgutil

import lightning.pytorch  # noqa: F401
import torch
import torch.distributed.checkpoint
import torch.distributed.device_mesh
import torchmetrics  # noqa: F401
import transformers.modeling_utils  # noqa: F401

import lightning_megatron
import tests.harness.state
import tests.harness.worker
import tests.parity.compare
import tests.parity.zoo.registry  # noqa: F401

for module in pkgutil.walk_packages(lightning_megatron.__path__, "lightning_megatron."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for name in ("generation.utils", *(f"models.{family}.modeling_{family}" for family in ("llama", "gpt2", "bert", "t5"))):
    importlib.import_module(f"transformers.{name}")

torch.set_num_threads(1)
gc.collect()
gc.freeze()
