"""What the tensor-parallel tests share: comparing a sharded module with its whole twin, and counting collectives."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_megatron.layers import ParameterSharding
from lightning_megatron.mesh.messages import exchange

EXACT = {"rtol": 1e-9, "atol": 1e-9}
# Hugging Face models that are given labels= compute their loss in float32, whatever their weights are: one unit in its
# last place is 5e-7 here, and gradients then differ by up to 4e-8.
FLOAT32_LOSS = {"rtol": 2e-6, "atol": 2e-6}
FLOAT32_GRADIENTS = {"rtol": 1e-7, "atol": 1e-7}
COUNTED = (
    "all_reduce",
    "all_gather_single",
    "reduce_scatter_single",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
)
AS_MESSAGES = {
    "DirectReduction": "all_reduce",
    "start_gather": "all_gather_single",
    "ScatteredSum": "reduce_scatter_single",
}


def tensor_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The tensor group of the harness's mesh."""
    return mesh["tensor_parallel"].get_group()


@contextlib.contextmanager
def count_collectives() -> Iterator[Counter[str]]:
    """Count the collectives that are started inside, by name."""
    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        for name in COUNTED:
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, _counting(counts, name, getattr(dist, name))))
        for name, collective in AS_MESSAGES.items():
            counted = _counting(counts, collective, getattr(exchange, name))
            stack.enter_context(mock.patch.object(exchange, name, counted))
        yield counts


def _counting(counts, name, function):
    def counted(*args, **kwargs):
        counts[name] += 1
        return function(*args, **kwargs)

    return counted


def reduce_partial_gradients(
    module: nn.Module, table: Mapping[str, ParameterSharding], group: dist.ProcessGroup
) -> None:
    """What a gradient engine does with the table: sum partial gradients over the tensor group, once."""
    seen: set[int] = set()
    for name, sharding in table.items():
        parameter = module.get_parameter(name)
        if id(parameter) in seen or parameter.grad is None:
            continue
        seen.add(id(parameter))
        if sharding.sums_gradient:
            dist.all_reduce(parameter.grad, group=group)


def assert_same_gradients(
    sharded: nn.Module, table: Mapping[str, ParameterSharding], whole: nn.Module, tolerance: Mapping[str, float] = EXACT
) -> None:
    """Every gradient of the sharded module is its part of the unsharded module's gradient."""
    for name, parameter in whole.named_parameters():
        local = sharded.get_parameter(name)
        if parameter.grad is None:
            assert local.grad is None or not local.grad.any(), f"{name} has a gradient only when sharded"
            continue
        assert local.grad is not None, f"{name} has no gradient when sharded"
        expected = table[name].spec.slice_full(parameter.grad)
        torch.testing.assert_close(local.grad, expected, **tolerance, msg=lambda m, n=name: f"gradient of {n}: {m}")


def assert_same_weights(
    sharded: nn.Module, table: Mapping[str, ParameterSharding], whole: nn.Module, tolerance: Mapping[str, float] = EXACT
) -> None:
    """Every weight of the sharded module is its part of the unsharded module's weight."""
    for name, parameter in whole.named_parameters():
        expected = table[name].spec.slice_full(parameter.detach())
        actual = sharded.get_parameter(name).detach()
        torch.testing.assert_close(actual, expected, **tolerance, msg=lambda m, n=name: f"weight {n}: {m}")


def random_tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same random tensor on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
