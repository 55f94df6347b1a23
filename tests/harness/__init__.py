"""Multi-process tests as plain functions.

A fresh launch of four Lightning ranks costs tens of seconds on a small machine, most of it imports. The harness keeps
worker processes alive between tests and hands them jobs, so that a test of four ranks costs what its own work costs:

    @run_ranks(tensor=2, pipeline=2)
    def test_something(mesh): ...    # one process group and one DeviceMesh per job

    outcomes = run_trainers(fn, devices=4)    # fn(rank_info) builds its own Trainer with ReusedProcesses(rank_info)
"""

from tests.harness.job import JobFailed, Outcome, RankInfo
from tests.harness.pool import run_job
from tests.harness.ranks import run_on_mesh, run_ranks
from tests.harness.trainers import ReusedProcesses, one_process, run_trainers

__all__ = [
    "JobFailed",
    "Outcome",
    "RankInfo",
    "ReusedProcesses",
    "one_process",
    "run_job",
    "run_on_mesh",
    "run_ranks",
    "run_trainers",
]
