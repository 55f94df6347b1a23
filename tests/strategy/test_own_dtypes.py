"""Parameters whose dtype a module's own forward changes have it before a run begins."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral
from transformers.models.switch_transformers import modeling_switch_transformers

from lightning_megatron.strategy.assembly import own_dtypes
from lightning_megatron.strategy.assembly.own_dtypes import convert_as_forward_does


def passed_on(function):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapped


class Assigned(nn.Linear):
    def forward(self, x):
        self.weight = self.weight.to(torch.float64) if self.weight.is_meta else self.weight
        self.weight.data = self.weight.data.double()
        return x


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 4)


class Called(Gated):
    def forward(self, x):
        self.gate.double()
        return x


class Reassigned(Gated):
    def forward(self, x):
        self.gate = self.gate.to(torch.float64)
        return x


class Elsewhere(Gated):
    """In a function inside of a method, behind a decorator of the user's."""

    @passed_on
    def convert(self):
        def run():
            self.gate.type(torch.float64)

        run()

    def forward(self, x):
        self.convert()
        return x


@pytest.mark.parametrize("kind", [Called, Reassigned, Elsewhere])
def test_what_a_forward_converts_is_converted_before(kind):
    module = nn.Sequential(kind())
    convert_as_forward_does(module)
    assert all(parameter.dtype == torch.float64 for parameter in module.parameters())


def test_data_that_a_forward_replaces_is_converted_before():
    module = nn.Sequential(Assigned(4, 4, bias=False))
    convert_as_forward_does(module)
    assert module[0].weight.dtype == torch.float64


def test_what_converts_nothing_of_its_own_keeps_its_dtype():
    module = nn.Sequential(nn.Linear(4, 4), Gated())
    convert_as_forward_does(module)
    assert all(parameter.dtype == torch.float32 for parameter in module.parameters())


@pytest.mark.parametrize("library", [modeling_llama, modeling_mixtral, modeling_switch_transformers])
def test_no_code_that_converts_is_left_unread_for_the_names_that_it_uses(library):
    kinds = {base for kind in vars(library).values() if inspect.isclass(kind) for base in kind.__mro__}
    functions = [each for kind in kinds for each in vars(kind).values() if inspect.isfunction(each)]
    converting = [each for each in functions if own_dtypes._CONVERTS.search(own_dtypes._source(each))]
    assert len(functions) > 100
    assert all(own_dtypes._names_a_conversion(each) for each in converting)
