"""Attributes of other objects are replaced for a time, and given back as they were."""

from __future__ import annotations

import copy
import pickle
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from lightning_megatron.mesh.replaced import Replaced, Replacements, has_other_method


class Greeter(nn.Module):
    """Something with a method."""

    def greet(self) -> str:
        return "hello"


def _hi() -> str:
    return "hi"


def _hey() -> str:
    return "hey"


def test_a_method_is_replaced_and_given_back() -> None:
    greeter, replaced = Greeter(), Replacements()
    before = dict(vars(greeter))
    replaced.call(greeter, "greet", _hi)
    assert greeter.greet() == "hi" and Greeter().greet() == "hello", "of one object"
    assert has_other_method(greeter, "greet") and not has_other_method(Greeter(), "greet")
    replaced.take_back()
    assert greeter.greet() == "hello" and vars(greeter) == before
    replaced.take_back()
    assert vars(greeter) == before, "twice is once"


def test_what_an_object_had_of_its_own_is_given_back() -> None:
    greeter = Greeter()
    greeter.__dict__["greet"] = _hey
    with Replacements() as replaced:
        replaced.call(greeter, "greet", _hi)
        assert greeter.greet() == "hi"
    assert greeter.__dict__["greet"] is _hey


def test_classes_and_modules_are_owners_too() -> None:
    class Other(Greeter):
        pass

    home = ModuleType("home")
    home.__dict__["number"] = 1
    method = vars(Greeter)["greet"]
    with Replacements() as replaced:
        replaced.put(Greeter, "greet", lambda _: "hi")
        replaced.put(Other, "greet", lambda _: "hey")
        replaced.put(home, "number", None)
        assert (Greeter().greet(), Other().greet(), home.number) == ("hi", "hey", None)
    assert vars(Greeter)["greet"] is method and "greet" not in vars(Other) and home.number == 1


def test_an_error_gives_everything_back() -> None:
    greeter = Greeter()
    with pytest.raises(ZeroDivisionError), Replacements() as replaced:
        replaced.call(greeter, "greet", _hi)
        raise ZeroDivisionError
    assert "greet" not in vars(greeter)


def test_a_name_that_is_not_there_is_refused() -> None:
    greeter, replaced = Greeter(), Replacements()
    with pytest.raises(AttributeError, match="salute"):
        replaced.call(greeter, "salute", _hi)
    assert "salute" not in vars(greeter)


def test_what_other_code_has_set_since_stays() -> None:
    greeter, replaced = Greeter(), Replacements()
    replaced.call(greeter, "greet", _hi)
    greeter.__dict__["greet"] = _hey
    replaced.take_back()
    assert greeter.greet() == "hey"


@pytest.mark.parametrize("owner", [Greeter(), Greeter], ids=["object", "class"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)], ids=str)
def test_several_may_replace_one_attribute_and_take_it_back_in_any_order(owner: Any, order: tuple[int, ...]) -> None:
    before, several = dict(vars(owner)), [Replacements() for _ in range(3)]
    for number, replaced in enumerate(several):
        replaced.put(owner, "greet", lambda *_, number=number: str(number))
    left = {0, 1, 2}
    for number in order:
        several[number].take_back()
        left.discard(number)
        assert owner.greet(owner) == str(max(left)) if left else dict(vars(owner)) == before


@pytest.mark.parametrize("how", [copy.deepcopy, lambda greeter: pickle.loads(pickle.dumps(greeter))])
def test_a_copy_has_the_method_of_its_class(how: Any) -> None:
    greeter = Greeter()
    with Replacements() as replaced:
        replaced.call(greeter, "greet", _hi)
        twin = how(greeter)
        assert greeter.greet() == "hi" and twin.greet() == "hello" and not has_other_method(twin, "greet")


def test_a_replaced_method_tells_what_it_wraps() -> None:
    stands = Replaced(Greeter(), "greet", _hi)
    assert stands.__name__ == "greet" and stands.__wrapped__ is _hi
