"""What is refused where ranks have parts of the model; without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_megatron import MegatronStrategy
from lightning_megatron.mesh.layout import Layout
from lightning_megatron.strategy.options.run_checks import check_run


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
    named = f"ModelPruning replaces weights .*tensor_parallel_size={tensor}` and `pipeline_parallel_size={pipeline}"
    with pytest.raises(MisconfigurationException, match=named):
        check_run(trainer, Small(), Layout(tensor=tensor, pipeline=pipeline), "auto")


@pytest.mark.parametrize("decision", [True, False])
def test_a_decision_before_the_processes_have_met_is_this_rank_s(decision: bool) -> None:
    assert MegatronStrategy().reduce_boolean_decision(decision) is decision
    assert MegatronStrategy().reduce_boolean_decision(decision, all=False) is decision
