"""What layers are given is cut where they are called: the tensor of tokens, wherever it is among the arguments."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron.context_parallel.region import TokenRegion, check_options
from lightning_megatron.context_parallel.token_shards import TokenShards

TOKENS, VECTOR = torch.zeros(2, 5, 4), torch.zeros(2, 4)


@pytest.fixture(scope="module")
def alone():
    """A group of one rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def region_of(layer, group):
    return TokenRegion(nn.Sequential(layer), [layer], group, check_options(2, None))


def test_a_vector_of_each_sample_before_the_tokens_stays_whole(alone):
    layer = nn.Linear(4, 4)
    region = region_of(layer, alone)
    region.scope.running = True
    vector, tokens = region.enter(layer, (VECTOR, TOKENS), {})[0]
    assert vector is VECTOR and type(tokens) is TokenShards


def test_layers_without_a_tensor_of_three_dims_are_refused(alone):
    layer = nn.Linear(4, 4)
    region = region_of(layer, alone)
    region.scope.running = True
    with pytest.raises(RuntimeError, match=r"\[batch, tokens, features\]; `0` was given \(2, 4\)"):
        region.enter(layer, (VECTOR,), {})


def test_layers_of_compiled_code_are_refused(alone):
    with pytest.raises(ValueError, match="`0` is a TorchScript module"):
        region_of(torch.jit.script(nn.Linear(4, 4)), alone)
