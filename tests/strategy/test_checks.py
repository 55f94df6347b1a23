"""What is refused, and what a summary runs, where ranks have parts of the model; without processes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning, ModelSummary
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_megatron.mesh.layout import Layout
from lightning_megatron.strategy.checks import check_run
from lightning_megatron.strategy.lightning.trainer_access import WholeSummaries


class Small(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(2, 2)
        self.example_input_array = torch.zeros(1, 2)


def trainer_with(callback: Any) -> Trainer:
    return Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=False, callbacks=[callback])


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_pruning_of_parts_is_refused_by_name(sizes: tuple[int, int]) -> None:
    trainer, (tensor, pipeline) = trainer_with(ModelPruning("l1_unstructured", amount=0.5)), sizes
    check_run(trainer, Small(), Layout(data=2), "auto")
    named = f"ModelPruning puts masks .*tensor_parallel_size={tensor}` and `pipeline_parallel_size={pipeline}"
    with pytest.raises(MisconfigurationException, match=named):
        check_run(trainer, Small(), Layout(tensor=tensor, pipeline=pipeline), "auto")


@pytest.mark.parametrize("divided", [False, True])
def test_a_summary_runs_no_divided_module(divided: bool) -> None:
    summary, module, examples = ModelSummary(), Small(), []
    trainer = trainer_with(summary)
    summary.on_fit_start = lambda trainer, module: examples.append(module.example_input_array)  # type: ignore[method-assign]
    summaries = WholeSummaries(trainer, nullcontext, divided=divided)
    summary.on_fit_start(trainer, module)
    summaries.remove()
    assert (examples[0] is None) == divided and module.example_input_array is not None
