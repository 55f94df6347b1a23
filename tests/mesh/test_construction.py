"""What constructors did on the meta device, done again, gives what they give with memory, and the same random state."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_megatron.checkpoints.loading.as_built import allocate_as_built, note_places, noting_construction
from lightning_megatron.mesh.draws.construction import Construction


class Own(nn.Module):
    """Tensors that constructors make by themselves, and initialisers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(7, 5) * 0.02)
        self.linear, self.other = nn.Linear(5, 5), nn.Linear(5, 5)
        nn.init.trunc_normal_(self.linear.weight, std=0.02)
        nn.init.orthogonal_(self.other.weight)
        nn.init.sparse_(self.other.weight, 0.3)
        self.convolution = nn.Conv1d(4, 4, 3)
        nn.init.dirac_(self.convolution.weight)
        self.embed = nn.Embedding(9, 5, padding_idx=0)
        self.decay = nn.Parameter(torch.log(torch.arange(1, 9, dtype=torch.float32).repeat(4, 1)))
        self.register_buffer("scale", torch.tensor([1.0, 2.0]) / torch.tensor(10000.0))
        self.register_buffer("mask", torch.ones(4, 4).tril().view(1, 1, 4, 4))
        for parameter in self.linear.parameters():
            parameter.data.mul_(0.3)


def tied() -> nn.Module:
    module = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    module["head"].weight = module["embed"].weight
    return module


def seeded() -> nn.Module:
    torch.manual_seed(7)
    first = nn.Linear(3, 3)
    torch.manual_seed(7)
    return nn.ModuleList([first, nn.Linear(3, 3)])


def forked() -> nn.Module:
    first = nn.Linear(3, 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        second = nn.Linear(3, 3)
    return nn.ModuleList([first, second, nn.Linear(3, 3)])


def mixed() -> nn.Module:
    first, real = nn.Linear(3, 3), torch.randn(3, device="cpu")
    module = nn.ModuleList([first, nn.Linear(3, 3)])
    module.register_buffer("real", real)
    return module


def from_numbers() -> nn.Module:
    module = nn.Linear(3, 4)
    module.weight.data.copy_(torch.from_numpy(torch.arange(12.0, device="cpu").view(4, 3).numpy()))
    return module


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of names of transformers' that peft uses
        return peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))


def llama() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 40}
    return AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=2, **sizes))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "own": Own,
    "copies of a layer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3),
    "recurrent": lambda: nn.LSTM(8, 8, 2),
    "parametrized": lambda: spectral_norm(nn.Linear(5, 4)),
    "bf16": lambda: Own().to(torch.bfloat16),
    **{made.__name__: made for made in (tied, seeded, forked, mixed, from_numbers, llama, lora)},
}


def values_of(module: nn.Module) -> dict[str, Any]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


def built(make: Callable[[], nn.Module], in_order: bool = True) -> nn.Module:
    constructions: list[Construction] = []
    with noting_construction(constructions), torch.device("meta"):
        module = make()
    assert all(value.is_meta for name, value in values_of(module).items() if name != "real")
    note_places(module, constructions, in_order=in_order)
    values = allocate_as_built(module, torch.device("cpu"), 1, {})
    if values is not None:
        values.start_alike(torch.device("cpu"))
        values.fill({})
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_the_random_state_behind_them_are_those_of_a_construction_with_memory(kind: str) -> None:
    torch.manual_seed(3)
    wanted, state = values_of(KINDS[kind]()), torch.get_rng_state()
    torch.manual_seed(3)
    found = values_of(built(KINDS[kind]))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value) and found[name].dtype == value.dtype, name
    assert torch.equal(torch.get_rng_state(), state), "what is drawn next is what one process draws next"
    if kind == "tied":
        assert len({id(value) for value in found.values()}) == 1


def test_what_is_built_in_memory_meanwhile_is_built_as_ever() -> None:
    torch.manual_seed(3)
    wanted, state = values_of(Own()), torch.get_rng_state()
    torch.manual_seed(3)
    with noting_construction([]):
        found = values_of(Own())
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert torch.equal(torch.get_rng_state(), state)


def test_where_files_have_the_values_only_what_is_here_is_drawn_and_the_random_state_stays() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, second = built(Own, in_order=False), built(Own, in_order=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.linear.weight, second.linear.weight) and first.linear.weight.std() > 0
    assert torch.equal(first.mask, Own().mask)


def test_memory_that_nobody_writes_and_generators_of_ones_own_are_left_to_others() -> None:
    def empty() -> nn.Module:
        module = nn.Linear(3, 3)
        module.extra = nn.Parameter(torch.empty(3))
        return module

    def generator() -> nn.Module:
        module = nn.Linear(3, 3)
        nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(1))
        return module

    for make in (empty, generator):
        assert all(value.is_meta for value in values_of(built(make)).values())
