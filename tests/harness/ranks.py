"""Tests of collectives and layers: a plain function of the DeviceMesh, run once per rank."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.harness.job import RankInfo, check_function, single
from tests.harness.pool import DEADLINE, run_job

AXES = ("pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel")


def run_on_mesh(
    function: Callable[..., Any],
    *args: Any,
    tensor: int = 1,
    context: int = 1,
    data: int = 1,
    pipeline: int = 1,
    deadline: float = DEADLINE,
    **kwargs: Any,
) -> list[Any]:
    """Runs ``function(mesh, *args, **kwargs)`` on ``tensor*context*data*pipeline`` gloo ranks.

    Returns:
        What each rank returned, in rank order.

    Raises:
        JobFailed: when a rank raised, died, or did not end within ``deadline`` seconds.
    """
    check_function(function)
    shape = (pipeline, data, context, tensor)
    ranks = pipeline * data * context * tensor
    name = (function.__module__, function.__qualname__)
    outcomes = run_job(_with_mesh, ranks, name, shape, args, kwargs, deadline=deadline)
    return single(outcomes)


def run_ranks(
    *,
    tensor: int = 1,
    context: int = 1,
    data: int = 1,
    pipeline: int = 1,
    deadline: float = DEADLINE,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Turns ``def test_x(mesh, *others)`` into a test that runs on that many ranks.

    The mesh's axes are `AXES`, outermost first. Further parameters (from ``parametrize`` or fixtures) must be
    picklable.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(**others: Any) -> None:
            sizes = {"tensor": tensor, "context": context, "data": data, "pipeline": pipeline}
            run_on_mesh(test, deadline=deadline, **sizes, **others)

        signature = inspect.signature(function)
        test.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
        test.rank_body = function  # type: ignore[attr-defined]
        del test.__wrapped__
        return test

    return decorate


def _with_mesh(
    info: RankInfo, name: tuple[str, str], shape: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    from tests.harness.job import Job

    function = Job(*name, info, (), {}, ()).resolve()
    return function(make_mesh(info, shape), *args, **kwargs)


def make_mesh(info: RankInfo, shape: tuple[int, ...]) -> DeviceMesh:
    """The job's process group and its mesh; the harness destroys the group when every rank is done."""
    store = info.meet()
    distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{info.port}", rank=info.rank, world_size=info.world_size
    )
    del store
    return init_device_mesh("cpu", shape, mesh_dim_names=AXES)
