"""The example of quantised weights: only scales train, every number is that of one process, and so is the optimizer."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_megatron import MegatronStrategy
from tests.examples.script import EXAMPLES, run_in_workers
from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.train import Recorder, Trace, make_trainer

wide = pytest.mark.wide
Found = tuple[list[float], dict[str, Tensor], int]


def scaling(info: RankInfo, options: dict[str, Any] | None) -> Found:
    """Losses and weights of a few steps in float64, and bytes of optimizer state; ``None``: of Lightning alone."""
    sys.path.insert(0, str(EXAMPLES))
    import alphatuning

    replicas = (options or {}).get("data_parallel_size", 1)
    args = SimpleNamespace(model="tiny", data=None, texts=32, seed=1, sequence=64)
    torch.manual_seed(1)
    module = alphatuning.AlphaTuning(alphatuning.coded(alphatuning.build_tiny_model(), 3).double().train(), 1e-2)
    rows = [row[:14] for row in alphatuning.load_rows(args)[0]][info.rank % replicas :: replicas]
    loader = DataLoader(rows, batch_size=8 // replicas, collate_fn=alphatuning.collate)  # type: ignore[arg-type]
    trace = Trace()
    strategy: Any = "auto"
    if options is not None:
        strategy = MegatronStrategy(micro_batch_loss_weight=alphatuning.count_targets, **options)
    trainer = make_trainer(info, strategy, max_epochs=2, precision="64-true", callbacks=[Recorder(trace)])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*in eval mode at the start of training")
        trainer.fit(module, loader, loader)
    weights = module.state_dict() if options is None else trainer.strategy.full_state_dict()
    (optimizer,) = trainer.optimizers
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    held = sum(value.numel() * value.element_size() for value in state if value.numel() > 1)
    return trace.losses, {name: weight.detach().clone() for name, weight in weights.items()}, held


@pytest.mark.wide
@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel_size": 2, "data_parallel_size": 2, "micro_batch_size": 2},
        {"data_parallel_size": 2},
        {"tensor_parallel_size": 2, "sequence_parallel": True},
        *(
            pytest.param(options, marks=wide)
            for options in (
                {"pipeline_parallel_size": 4, "micro_batch_size": 2},
                {"pipeline_parallel_size": 2, "activation_recompute": "full", "micro_batch_size": 4},
                {"pipeline_parallel_size": 2, "pipeline_schedule": "zb-h1", "micro_batch_size": 4},
                {"data_parallel_size": 2, "weight_sharding": True},
                {"tensor_parallel_size": 2},
                {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "micro_batch_size": 2},
            )
        ),
    ],
    ids=str,
)
def test_losses_and_scales_are_those_of_one_process_and_only_scales_have_state(options: dict[str, Any]) -> None:
    sizes = ("pipeline_parallel_size", "data_parallel_size", "tensor_parallel_size")
    devices = torch.Size(options.get(size, 1) for size in sizes).numel()
    losses, weights, held = one_process(scaling, None)
    outcomes = [outcome.value for outcome in run_trainers(scaling, options, devices=devices)]
    means = [sum(step) / devices for step in zip(*(found for found, *_ in outcomes), strict=True)]
    assert means == pytest.approx(losses, rel=1e-6) and losses[-1] < losses[0]
    whole = outcomes[0][1]
    assert whole.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(whole[name], weight, rtol=0, atol=1e-6, msg=name)  # its loss is in float32
    scales = sum(weight.numel() for name, weight in weights.items() if name.endswith(".scale"))
    assert held == 2 * 8 * scales
    most = held * options.get("tensor_parallel_size", 1) + 64 * devices  # scales of layers that are split by input
    assert held <= sum(found for *_, found in outcomes) <= most


@pytest.mark.wide
def test_the_loss_falls_and_the_scales_and_the_model_are_saved(tmp_path: Path) -> None:
    run = run_in_workers("alphatuning.py", tmp_path, processes=4)
    assert run.code == 0, run.output
    assert run.number("Loss after") < 0.95 * run.number("Loss before")
    folder = tmp_path / "runs" / "alphatuning"
    model, found = AutoModelForCausalLM.from_pretrained(folder / "model", output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    scales = load_file(folder / "scales.safetensors")
    assert len(scales) == 4 * 7 and all(value.ndim == 1 for value in scales.values())
    rows = model.model.layers[1].mlp.up_proj.weight[0].unique()
    assert len(rows) <= 8, "three bits"
