"""Stand-ins know what they are, in every step, whatever is made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.pipeline.elsewhere.away import (
    STATE,
    Away,
    StageSource,
    forget_written,
    make_real,
    mark,
    refuse_away,
    unmarked,
)


def stand_in() -> Tensor:
    return mark(torch.zeros(3, 4, requires_grad=True).clone(), StageSource("embed"))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1,
        lambda x: torch.ones(4) * x[0].detach(),
        lambda x: (x.detach() > 0).double(),
        lambda x: torch.cat([torch.ones(1, 4), x]),
        lambda x: torch.stack([torch.ones(()), x.mean()]).sum(),
        lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2])),
        lambda x: torch.nn.Linear(4, 2)(x),
        lambda x: x.max(-1).values,
        lambda x: x.data,
        lambda x: torch.add(x, 1, out=torch.empty(3, 4)) if not x.requires_grad else x.view(-1),
    ],
)
def test_what_is_made_of_a_stand_in_is_one(function: Callable[[Tensor], Tensor]) -> None:
    made = function(stand_in())
    assert type(made) is Away
    with pytest.raises(RuntimeError, match=r'the loss depends on `embed`.*pipeline_placement=\{"embed": "all"\}'):
        refuse_away({"loss": [made]}, "the loss")


@pytest.mark.parametrize(
    "read", [float, bool, int, Tensor.item, Tensor.tolist, lambda x: torch.equal(x, x), np.asarray, lambda x: 1.0 in x]
)
def test_reading_its_numbers_is_refused(read: Callable[[Any], Any]) -> None:
    with pytest.raises(RuntimeError, match="the step reads, in Python, a number that depends on `embed`"):
        read(stand_in().detach().sum())


def test_shapes_are_no_numbers() -> None:
    x = stand_in()
    blind = [torch.zeros_like(x), x.new_ones(2), torch.ones(2).to(x), torch.isnan(x)]
    assert all(type(tensor) is Tensor for tensor in blind)
    assert (x.shape, x.dtype, len(x)) == ((3, 4), torch.float32, 3)
    refuse_away(blind, "nothing")


def test_a_tensor_that_is_written_into_is_one_until_the_run_ends() -> None:
    total = torch.zeros(3, 4)
    total.add_(stand_in().detach())
    assert type(total) is Away and STATE.written
    forget_written()
    assert type(total) is Tensor and not STATE.written


def test_one_that_has_arrived_is_a_tensor_like_any_other() -> None:
    x = stand_in()
    assert type(make_real(x)) is Tensor and type(x * 2) is Tensor


def test_nothing_is_marked_while_only_shapes_are_wanted() -> None:
    with unmarked():
        assert type(stand_in() + 1) is Tensor and type(mark(torch.zeros(1), StageSource("embed"))) is Tensor


def test_words_about_it_say_what_it_is() -> None:
    words = f"{stand_in().detach().sum():.3f}"
    assert words == "<tensor of `embed` on another pipeline stage>" == repr(stand_in())
