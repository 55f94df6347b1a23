"""What calls have returned, told to the stages that skip them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.pipeline.stage.forms import Forms, filled, form_of, shapes_of

CPU = torch.device("cpu")
X, COUNT = torch.randn(2, 3), torch.ones(4, dtype=torch.long)


def _zeros(form: Any) -> Any:
    return filled(pickle.loads(pickle.dumps(form)), CPU, lambda shape, dtype, at: torch.zeros(shape, dtype=dtype))


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, dict):
        return {key: _described(entry) for key, entry in value.items()}
    return type(value)(map(_described, value)) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize(
    "value",
    [X, (X, None), [X, COUNT, 0.5, True], {"x": X, 1: (COUNT, "name")}, (X, [], ()), (X, float("inf"))],
)
def test_a_form_is_sent_and_filled(value: Any) -> None:
    assert _described(_zeros(form_of(value))) == _described(value)


def test_what_is_of_another_class_has_no_form() -> None:
    class Own(dict[str, Any]):
        pass

    assert form_of(Own(x=X)) is form_of((X, Own())) is form_of({X: 1}) is form_of(object()) is None


def test_forms_tell_shapes_dtypes_lengths_and_numbers_apart() -> None:
    values: list[Any] = [X, X[:1], X.double(), [X], (X,), (X, 1), (X, 2), (X, X), None]
    forms = [form_of(value) for value in values]
    assert all(one != other for at, one in enumerate(forms) for other in forms[:at])


def test_shapes_of_a_form_are_those_of_its_tensors() -> None:
    assert shapes_of(form_of({"x": X, "more": [1, (COUNT, None)]})) == [(2, 3), (4,)] and shapes_of(None) == []


def test_forms_differ_where_both_tell() -> None:
    one = Forms({0: form_of(X)}, {(4, 1): form_of(COUNT)})
    assert not one.differ(Forms({0: form_of(X)})) and not one.differ(Forms({0: form_of(X)}, dict(one.parts)))
    assert one.differ(Forms({0: form_of(COUNT)})) and one.differ(Forms(one.layers, {(4, 1): form_of(X)}))
    assert one.with_later(Forms({1: None})) == Forms({0: form_of(X), 1: None}, one.parts)
