"""Imported once by the process that workers are forked from, so that a fresh worker costs milliseconds, not seconds.

Every job that fails on purpose ends its workers, so a session starts hundreds of them. What is imported here stays for
the whole session and is frozen: every collection of garbage (one after each job, in each worker) would otherwise walk
through the hundreds of thousands of objects that torch and Lightning consist of. Tests of what an import does start a
process of their own.
"""

import gc
import importlib
import inspect
import logging
import pkgutil
import sys
import warnings

import torch
import torch.distributed.checkpoint
import torch.distributed.device_mesh
import torchmetrics  # noqa: F401
import transformers.modeling_utils  # noqa: F401
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_megatron
import tests.harness.state
import tests.harness.worker
import tests.parity.compare  # noqa: F401
from lightning_megatron.pipeline.elsewhere.abstract import abstract_run
from tests.harness.device import on_gpu
from tests.parity.zoo.registry import ZOO


def learn_shapes() -> None:
    """Lets torch take the operations of ordinary layers apart, once for all workers.

    A stage asks what the layers of other stages return, on fake tensors, and torch remembers by operation and shape.
    """
    torch.set_default_dtype(torch.float64)
    for name in ("nanogpt", "hf_llama", "hf_gpt2"):
        model = next(ZOO[name].build().children())
        for batch in (2, 4, 8):
            abstract_run(model, model.forward, (torch.zeros(batch, 8, dtype=torch.int64),), {})
    torch.set_default_dtype(torch.float32)


def learn_training() -> None:
    """Takes a step of a plain Trainer: a quarter of a worker's first job is what Python and Lightning look up once.

    Python remembers the file of every module (`inspect`) and which class is of which kind (`abc`). No threads come of
    it, which a fork would lose; a torch built for GPUs starts some in its first backward, and is not asked to.
    """
    inspect.getmodule(sys._getframe())
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu", devices=1, max_steps=1, limit_val_batches=1, enable_model_summary=False, **quiet
        )
        trainer.fit(BoringModel())
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)


for module in pkgutil.walk_packages(lightning_megatron.__path__, "lightning_megatron."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for name in ("generation.utils", *(f"models.{family}.modeling_{family}" for family in ("llama", "gpt2", "bert", "t5"))):
    importlib.import_module(f"transformers.{name}")

torch.set_num_threads(1)
if not on_gpu():  # fake tensors ask what devices there are, which starts CUDA
    learn_shapes()
if torch.version.cuda is None and torch.version.hip is None:
    learn_training()
gc.collect()
gc.freeze()
