"""Copies of batches of all kinds: of the same class, with tensors of their own, which share what the batch shares."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lightning_megatron.strategy.logs.batch_copies import tensors_of, whole_copy

transformers = pytest.importorskip("transformers")


class ItsOwnAttributes(dict[str, Any]):
    """The usual dict whose entries are its attributes."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        self.__dict__ = self


class NeedsItems(list[Any]):
    """A list that is not made empty."""

    def __init__(self, items: Any) -> None:
        super().__init__(items)


class Named(list[Any]):
    """A list with an attribute."""

    name = ""


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor


@dataclasses.dataclass
class Slots:
    __slots__ = ("x",)
    x: Tensor


class Plain:
    def __init__(self, x: Tensor) -> None:
        self.x = x


Pair = namedtuple("Pair", "a b")
X = torch.arange(3.0)
BATCHES: list[Any] = [
    *(X, [X, "a", None], (X, torch.Size([2])), Pair(X, {"k": X}), {"x": X, "deep": [{"y": X[1:].clone()}]}),
    *(ItsOwnAttributes(x=X), NeedsItems([X]), Named([X]), Frozen(X), Slots(X), Plain(X), OrderedDict(x=X)),
    *(defaultdict(list, x=X), pack_sequence([X, X[:2]])),
    transformers.BatchEncoding({"input_ids": X}),
    transformers.modeling_outputs.BaseModelOutput(last_hidden_state=X),
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_a_copy_is_of_its_class_and_has_tensors_of_its_own(batch):
    copied = whole_copy(batch)
    assert type(copied) is type(batch)
    pairs = list(zip(tensors_of(batch), tensors_of(copied), strict=True))
    assert pairs
    for one, other in pairs:
        assert torch.equal(one, other)
        other.add_(1)
        assert not torch.equal(one, other)


def test_a_copy_shares_memory_where_the_batch_does():
    copied = whole_copy({"tokens": X, "same": X, "labels": X[1:]})
    copied["labels"].add_(10)
    assert copied["same"] is copied["tokens"]
    assert copied["tokens"].tolist() == [0, 11, 12]
    assert X.tolist() == [0, 1, 2]


def test_entries_that_are_attributes_stay_such():
    copied = whole_copy(ItsOwnAttributes(x=X))
    copied.y = 3
    assert copied["y"] == 3
    assert copied.x is copied["x"]


def test_attributes_of_a_list_are_kept():
    named = Named([X])
    named.name = "rows"
    assert whole_copy(named).name == "rows"
