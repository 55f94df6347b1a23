"""Compares anything a Trainer run can report with the same run on one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor

from tests import harness
from tests.harness import RankInfo, run_trainers
from tests.harness.remember import remembered
from tests.parity.train import make_trainer

Layout = tuple[int, int]  # pipeline, data


def trainer_for(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], **options: Any) -> Trainer:
    """A plain Trainer when ``layout`` is None, else one with the strategy in that layout.

    Args:
        info: this process.
        layout: pipeline and data-parallel size.
        arguments: further arguments of the strategy.
        options: arguments of the Trainer.
    """
    if layout is None:
        return make_trainer(info, "auto", **options)
    from lightning_megatron import MegatronStrategy

    settings = {"micro_batch_size": 2, **arguments}
    strategy = MegatronStrategy(pipeline_parallel_size=layout[0], data_parallel_size=layout[1], **settings)
    return make_trainer(info, strategy, **options)


def trained_state(
    info: RankInfo,
    layout: Layout | None,
    arguments: Mapping[str, Any],
    module: LightningModule,
    data: LightningDataModule | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """The whole state of a module after its training; on rank 0, nothing on the others.

    Args:
        info: this process.
        layout: see :func:`trainer_for`.
        arguments: likewise.
        module: trained.
        data: what it is trained on, if that is not the module's.
        options: arguments of the Trainer.
    """
    trainer = trainer_for(info, layout, arguments, **options)
    trainer.fit(module, datamodule=data)
    state = module.state_dict() if layout is None else trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    return {name: value.clone() for name, value in state.items()}


@remembered
def one_process(scenario: Callable[..., Any]) -> Any:
    """The scenario's report from a plain Trainer."""
    return run_trainers(scenario, None, {}, devices=1)[0].value


def compare_scenario(
    scenario: Callable[..., Any],
    layout: Layout = (2, 1),
    tolerance: float = 1e-9,
    own: Callable[[int, Any], Any] | None = None,
    **arguments: Any,
) -> list[Any]:
    """Runs ``scenario(info, layout, arguments)`` on every rank and on one process.

    Args:
        scenario: importable by name; builds its Trainer with `trainer_for` and returns plain data.
        layout: pipeline and data-parallel size.
        tolerance: absolute and relative, for floats and tensors.
        own: ``own(replica, reference)`` is the part of the reference that a replica should report; default all.
        arguments: of the strategy.

    Returns:
        What each rank reported.

    Raises:
        AssertionError: naming the first differences.
    """
    reference = one_process(scenario)
    tensor = arguments.get("tensor_parallel_size", 1)
    outcomes = run_trainers(scenario, layout, arguments, devices=layout[0] * layout[1] * tensor)
    for outcome in outcomes:
        expected = own(outcome.rank // tensor % layout[1], reference) if own else reference
        found = list(differences("", outcome.value, expected, tolerance))
        assert not found, f"rank {outcome.rank}: " + "\n".join(found[:10])
    return [outcome.value for outcome in outcomes]


def differences(path: str, got: Any, expected: Any, tolerance: float) -> Iterator[str]:
    if isinstance(expected, Tensor) and isinstance(got, Tensor):
        if got.shape != expected.shape or not torch.allclose(
            got.double(), expected.double(), rtol=tolerance, atol=tolerance
        ):
            yield f"{path}: {got} instead of {expected}"
    elif isinstance(expected, Mapping) and isinstance(got, Mapping):
        if set(got) != set(expected):
            yield f"{path}: keys {sorted(map(str, got))} instead of {sorted(map(str, expected))}"
        for key in expected:
            if key in got:
                yield from differences(f"{path}.{key}", got[key], expected[key], tolerance)
    elif isinstance(expected, (list, tuple)) and isinstance(got, Sequence) and not isinstance(got, str):
        if len(got) != len(expected):
            yield f"{path}: {len(got)} entries instead of {len(expected)}: {list(got)[:40]} and {list(expected)[:40]}"
        for index, (one, other) in enumerate(zip(got, expected, strict=False)):
            yield from differences(f"{path}[{index}]", one, other, tolerance)
    elif isinstance(expected, float) and isinstance(got, (int, float)):
        same = math.isclose(got, expected, rel_tol=tolerance, abs_tol=tolerance)
        if not same and not (math.isnan(got) and math.isnan(expected)):
            yield f"{path}: {got!r} instead of {expected!r}"
    elif got != expected:
        yield f"{path}: {got!r} instead of {expected!r}"


def count_as_one_process(trained: Any, name: str, layout: Layout, arguments: Mapping[str, Any]) -> None:
    """Weights and logged values that ``trained`` gives of a module are those of one process with whole batches."""
    expected = harness.one_process(trained, None, name, {})
    axes = (arguments.get(f"{axis}_parallel_size", 1) for axis in ("tensor", "context"))
    found = run_trainers(trained, layout, name, arguments, devices=layout[0] * layout[1] * math.prod(axes))[0]
    for what in ("weights", "logged"):
        assert not list(differences(what, found.value[what], expected[what], 1e-9)), found.output
