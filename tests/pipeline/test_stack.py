"""Wrappers around a module's forward: nested by slot, whoever came first, and gone without a trace."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.layers.multiply.float8 import FLOAT8
from lightning_megatron.pipeline.cut.trunk import LayersHere
from lightning_megatron.pipeline.forwards.compiled import CompiledCall, compile_layers
from lightning_megatron.pipeline.forwards.entry import Entry, has_entry
from lightning_megatron.pipeline.forwards.low_precision_linears import multiply_in_8_bits
from lightning_megatron.pipeline.forwards.recompute import RecomputedCall, recompute_layers
from lightning_megatron.pipeline.forwards.stack import ForwardSlot, ForwardStack, Wrapper
from lightning_megatron.pipeline.forwards.weight_gradients import WeightGradients


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, times: int = 2) -> Any:
        return x * times


class Noting(Wrapper):
    """Notes its slot on the way in."""

    def __init__(self, module: nn.Module, slot: ForwardSlot, seen: list[ForwardSlot]) -> None:
        super().__init__(module)
        self.slot, self.seen = slot, seen  # type: ignore[misc]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(self.slot)
        return self.forward(*args, **kwargs)


def wrapped(slots: Any = ForwardSlot) -> tuple[Doubling, list[ForwardSlot]]:
    module, seen = Doubling(), list[ForwardSlot]()
    for slot in slots:
        Noting(module, slot, seen).install()
    return module, seen


@pytest.mark.parametrize("order", list(itertools.permutations([0, 2, 3, 5])), ids=str)
def test_wrappers_are_nested_by_slot_whoever_came_first(order: tuple[int, ...]) -> None:
    module, seen = wrapped(map(ForwardSlot, order))
    assert module(3) == 6 and module(3, times=3) == 9
    assert seen == [0, 2, 3, 5] * 2


def test_a_second_wrapper_takes_the_place_of_the_first_in_its_slot() -> None:
    module, seen = wrapped()
    other: list[ForwardSlot] = []
    Noting(module, ForwardSlot.COMPILE, other).install()
    assert module(3) == 6
    assert ForwardSlot.COMPILE not in seen and other == [ForwardSlot.COMPILE]


@pytest.mark.parametrize("order", list(itertools.permutations([0, 2, 5])), ids=str)
def test_with_the_last_wrapper_the_instance_attribute_goes(order: tuple[int, ...]) -> None:
    module, seen = wrapped(map(ForwardSlot, sorted(order)))
    for count, slot in enumerate(order):
        ForwardStack.of(module).remove(ForwardSlot(slot))
        seen.clear()
        assert module(3) == 6 and seen == sorted(order[count + 1 :])
    assert "forward" not in module.__dict__
    ForwardStack.of(module).remove(ForwardSlot.PIPELINE)
    assert "forward" not in module.__dict__, "what is not there can be removed"


@pytest.mark.parametrize("own", [lambda x, factor=3: x * factor, nn.Identity(), Doubling().forward], ids=type)
def test_a_forward_that_the_user_put_on_the_instance_is_the_bottom_and_comes_back(own: Any) -> None:
    module = Doubling()
    module.__dict__["forward"] = own
    expected, seen = module(5), list[ForwardSlot]()
    for slot in (ForwardSlot.SPLIT, ForwardSlot.PIPELINE):
        Noting(module, slot, seen).install()
    stack = ForwardStack.of(module)
    assert module(5) == expected and seen == [ForwardSlot.PIPELINE, ForwardSlot.SPLIT]
    assert stack.own is own and not stack.runs_class_forward
    for slot in seen:
        ForwardStack.of(module).remove(slot)
    assert module.__dict__["forward"] is own


def test_a_function_put_over_the_wrappers_is_the_bottom_of_further_ones() -> None:
    module, seen = wrapped([ForwardSlot.RECOMPUTE])
    inner = module.forward
    module.forward = lambda x: inner(x) + 1  # type: ignore[method-assign, assignment]
    foreign = module.__dict__["forward"]
    Noting(module, ForwardSlot.PRODUCTS, seen).install()
    assert module(3) == 7 and seen == [ForwardSlot.PRODUCTS, ForwardSlot.RECOMPUTE]
    ForwardStack.of(module).remove(ForwardSlot.PRODUCTS)
    assert module.__dict__["forward"] is foreign


def test_a_wrapper_borrowed_by_another_module_is_that_modules_own_forward() -> None:
    module, seen = wrapped([ForwardSlot.RECOMPUTE])
    other = Doubling()
    other.forward = module.forward  # type: ignore[method-assign]
    assert ForwardStack.of(other).get(ForwardSlot.RECOMPUTE) is None
    Noting(other, ForwardSlot.PIPELINE, seen).install()
    assert module(3) == 6 and seen == [ForwardSlot.RECOMPUTE], "the lender is as it was"


def test_a_wrapped_module_has_the_signature_of_its_own_forward() -> None:
    plain, (module, _) = Doubling(), wrapped()
    assert inspect.signature(module.forward) == inspect.signature(plain.forward)
    assert ForwardStack.of(plain).runs_class_forward and ForwardStack.of(module).runs_class_forward


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["copy", "pickle"]
)
def test_a_copy_has_wrappers_of_its_own(how: Any) -> None:
    module, seen = wrapped([ForwardSlot.PIPELINE, ForwardSlot.COMPILE])
    twin = how(module)
    stack, copied = ForwardStack.of(module), ForwardStack.of(twin)
    assert twin(3) == 6 and not seen, "the original's wrappers are not run"
    assert copied is not stack and copied.own.__self__ is twin
    assert copied.get(ForwardSlot.PIPELINE).module is twin  # type: ignore[union-attr]
    for slot in (ForwardSlot.COMPILE, ForwardSlot.PIPELINE):
        copied.remove(slot)
    assert "forward" not in twin.__dict__
    assert module(3) == 6 and len(seen) == 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_recomputation_and_compilation_give_one_nesting_in_either_order() -> None:
    calls = {
        "recompute": lambda net: recompute_layers(LayersHere(net), "full"),
        "compile": lambda net: compile_layers(LayersHere(net), {"backend": "eager"}),
        "eight": lambda net: multiply_in_8_bits(LayersHere(net), True),
    }
    for order in itertools.permutations(calls):
        net = Net()
        for name in order:
            calls[name](net)
        layer: Any = net.layers[0]
        assert isinstance(layer.forward, RecomputedCall) and isinstance(layer.forward.forward, CompiledCall), order
        recompute_layers(LayersHere(net), None)
        compile_layers(LayersHere(net), False)
        multiply_in_8_bits(LayersHere(net), False)
        assert not any("forward" in child.__dict__ for child in net.modules()), order


def test_a_linear_with_a_forward_put_on_it_keeps_that_under_split_backwards_and_8_bits() -> None:
    net = Net()
    patched: Any = net.layers[0].linear
    patched.forward = lambda x: 3 * x
    multiply_in_8_bits(LayersHere(net), True)
    weights = WeightGradients(net.layers)
    with weights.installed():
        assert torch.equal(patched(torch.ones(1, 16)), 3 * torch.ones(1, 16))
        split: Any = net.layers[1].linear.forward
        assert split.slot is ForwardSlot.SPLIT and split._products is FLOAT8
    recompute_layers(LayersHere(net), ["*.linear"])
    with weights.installed():
        assert torch.equal(patched(torch.ones(1, 16)), 3 * torch.ones(1, 16))


def test_turning_compilation_off_leaves_a_forward_put_on_a_layer() -> None:
    net = Net()
    compile_layers(LayersHere(net), {"backend": "eager"})
    own = net.layers[1].__dict__["forward"] = lambda x: 3 * x
    compile_layers(LayersHere(net), False)
    assert "forward" not in net.layers[0].__dict__ and net.layers[1].__dict__["forward"] is own


def test_an_entry_takes_calls_before_hooks_run_and_gives_them_back() -> None:
    met: list[str] = []

    class Noting(Entry):
        def __init__(self, module: nn.Module) -> None:
            self.module = module

        def enter(self, *args: Any, **kwargs: Any) -> Any:
            met.append("entry")
            return self.run_hooked(*args, **kwargs)

    layer = nn.Linear(2, 2)
    layer.register_forward_pre_hook(lambda *_: met.append("hook"))
    entry = Noting(layer)
    entry.open()
    assert has_entry(layer) and layer(torch.ones(2)).shape == (2,) and met == ["entry", "hook"]
    entry.close()
    entry.close()
    assert not has_entry(layer) and layer(torch.ones(2)).shape == (2,) and met == ["entry", "hook", "hook"]
