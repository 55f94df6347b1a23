"""What is remembered of an object goes with it: into copies, not into state dicts."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn

from lightning_megatron.checkpoints.loading.pretrained import start_from
from lightning_megatron.mesh.marks import Marks
from lightning_megatron.mesh.parts.packages import is_library


@dataclass
class About:
    """Something that refers to the module that it is about."""

    module: nn.Module


def test_asking_leaves_nothing_and_the_last_value_takes_the_attribute_along() -> None:
    module = nn.Linear(2, 2)
    before = dict(module.__dict__)
    assert Marks.of(module).get(About) is None and Marks.of(module).take(About) is None
    assert module.__dict__ == before
    about = Marks.of(module).put(About(module))
    Marks.of(module).put("words")
    assert Marks.of(module).get(About) is about and Marks.of(module).get(str) == "words"
    assert set(module.__dict__) - set(before) == {"_lightning_megatron"}, "one attribute, whatever is remembered"
    assert set(module.state_dict()) == {"weight", "bias"}
    assert is_library(type(module.__dict__["_lightning_megatron"])), "or it is followed as what user code may fill"
    assert Marks.of(module).take(str) == "words" and Marks.of(module).take(About) is about
    assert module.__dict__ == before


def _pickled(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("how", [copy.deepcopy, _pickled])
def test_a_copy_has_marks_of_its_own_about_itself(how: Any) -> None:
    module = nn.Linear(2, 2)
    Marks.of(module).put(About(module))
    twin = how(module)
    found = Marks.of(twin).get(About)
    assert found is not None and found.module is twin
    Marks.of(twin).take(About)
    assert "_lightning_megatron" not in twin.__dict__ and Marks.of(module).get(About) is not None


def test_weights_are_loaded_once_from_one_place() -> None:
    module = nn.Linear(2, 2)
    assert start_from(module, None) is None
    assert start_from(module, "here") == "here" and start_from(module, "here") is None
    assert start_from(module, "there") == "there"
