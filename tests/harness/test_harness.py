"""The harness itself: results, failures, hangs, reuse; Lightning's own DDP is the strategy that is known to work."""

from __future__ import annotations

import os
import time
import warnings

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed

from tests.harness import JobFailed, RankInfo, ReusedProcesses, run_job, run_on_mesh, run_ranks, run_trainers


def whoami(info: RankInfo) -> tuple[int, int, int, str]:
    return info.rank, info.world_size, os.getpid(), os.environ["HF_HUB_OFFLINE"]


def fail_on(info: RankInfo, rank: int) -> None:
    if info.rank == rank:
        raise KeyError("the original message")
    time.sleep(60)


def hang_in_a_named_function(info: RankInfo) -> None:
    time.sleep(600)


def leave_a_mess(info: RankInfo) -> None:
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    os.chdir("/")


def look_for_a_mess(info: RankInfo) -> tuple[bool, torch.dtype, str, float]:
    return "LEFT_BEHIND" in os.environ, torch.get_default_dtype(), os.getcwd(), torch.rand(()).item()


def warn(info: RankInfo) -> None:
    warnings.warn("nobody reads this", stacklevel=1)


def exit_hard(info: RankInfo) -> None:
    os._exit(3)


def test_each_rank_returns_its_value_and_processes_are_reused() -> None:
    first = [outcome.value for outcome in run_job(whoami, 2)]
    second = [outcome.value for outcome in run_job(whoami, 2)]
    assert [value[:2] for value in first] == [(0, 2), (1, 2)]
    assert first == second
    assert first[0][2] != os.getpid()
    assert first[0][3] == "1"


def test_a_failing_rank_is_named_and_the_others_do_not_wait_for_the_deadline() -> None:
    with pytest.raises(JobFailed) as caught:
        run_job(fail_on, 2, 1, grace=0.5)
    zero, one = caught.value.outcomes
    assert one.error == "KeyError: 'the original message'"
    assert "builtins.LookupError" in one.error_types
    assert "raise KeyError" in str(caught.value)
    assert zero.error == "killed while running: another rank had failed"
    assert "fail_on" in zero.stacks


def test_stacks_are_written_after_a_trainer_has_been_in_the_process() -> None:
    run_trainers(fit_boring, devices=2)
    outcomes = run_job(hang_in_a_named_function, 2, deadline=1.0, check=False)
    assert all("hang_in_a_named_function" in outcome.stacks for outcome in outcomes)


def test_a_hang_is_killed_with_every_ranks_stack_and_the_next_job_gets_fresh_processes() -> None:
    before = {outcome.value[2] for outcome in run_job(whoami, 2)}
    with pytest.raises(JobFailed) as caught:
        run_job(hang_in_a_named_function, 2, deadline=1.0)
    assert all("hang_in_a_named_function" in outcome.stacks for outcome in caught.value.outcomes)
    assert "deadline 1.0 s" in str(caught.value)
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not before & {outcome.value[2] for outcome in run_job(whoami, 2)}


def test_a_process_that_dies_is_reported_with_its_exit_code() -> None:
    (outcome,) = run_job(exit_hard, 1, check=False)
    assert outcome.error is not None and "exit code 3" in outcome.error


def test_a_job_leaves_nothing_behind() -> None:
    clean = [outcome.value for outcome in run_job(look_for_a_mess, 1)]
    run_job(leave_a_mess, 1)
    ((left, dtype, directory, number),) = [outcome.value for outcome in run_job(look_for_a_mess, 1)]
    assert not left and dtype == torch.float32 and directory != "/"
    assert number == clean[0][3]


def test_a_warning_in_a_worker_is_an_error() -> None:
    (outcome,) = run_job(warn, 1, check=False)
    assert outcome.error == "UserWarning: nobody reads this"


def test_a_function_that_workers_cannot_import_is_refused() -> None:
    with pytest.raises(ValueError, match="define it at the top level"):
        run_job(lambda info: None, 1)


@run_ranks(tensor=2, pipeline=2)
def test_the_mesh_has_the_axes_and_groups_of_the_layout(mesh: distributed.DeviceMesh) -> None:
    total = torch.tensor(float(distributed.get_rank()))
    distributed.all_reduce(total, group=mesh["tensor_parallel"].get_group())
    assert total.item() == {0: 1.0, 1: 5.0}[mesh["pipeline_parallel"].get_local_rank()]


@pytest.mark.parametrize("value", [1, 2])
@run_ranks(data=2)
def test_parameters_of_a_test_reach_the_ranks(mesh: distributed.DeviceMesh, value: int) -> None:
    assert value in (1, 2) and mesh.size() == 2


def rank_in_mesh(mesh: distributed.DeviceMesh, offset: int) -> int:
    return mesh.get_rank() + offset


def test_run_on_mesh_returns_every_ranks_value() -> None:
    assert run_on_mesh(rank_in_mesh, 10, data=2) == [10, 11]


def fit_boring(info: RankInfo) -> tuple[float, int, int]:
    trainer = Trainer(
        strategy=DDPStrategy(process_group_backend="gloo"),
        accelerator="cpu",
        devices=info.world_size,
        plugins=[ReusedProcesses(info)],
        max_steps=2,
        limit_val_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = BoringModel()
    trainer.fit(model)
    return (
        float(sum(parameter.detach().abs().sum() for parameter in model.parameters())),
        trainer.global_rank,
        os.getpid(),
    )


def test_a_second_trainer_runs_in_the_same_processes() -> None:
    first = run_trainers(fit_boring, devices=2)
    second = run_trainers(fit_boring, devices=2)
    assert [outcome.value[2] for outcome in second] == [outcome.value[2] for outcome in first]
    assert [outcome.value[1] for outcome in second] == [0, 1]
    assert first[0].value[0] == second[0].value[0] == second[1].value[0]
