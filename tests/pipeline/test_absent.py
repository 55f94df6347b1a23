"""Weights of other stages, as a step of the module's own code meets them."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from lightning_megatron.pipeline.elsewhere.absent import make_absent
from lightning_megatron.pipeline.elsewhere.away import unmarked
from lightning_megatron.pipeline.elsewhere.listing import Unread
from lightning_megatron.pipeline.elsewhere.presence import Phase


def test_writing_into_a_weight_of_another_stage_does_nothing_in_a_step_either():
    zeros = torch.zeros(()).expand(2, 3)
    absent = make_absent(zeros, "layers.1.weight", lambda *, lists=False: Phase.STEP)
    assert absent.div_(2) is absent
    absent[0] = 1
    absent += 1
    assert absent.add_(torch.ones(2, 3), alpha=2) is absent
    here = torch.ones(2, 3)
    torch._foreach_add_([absent, here], [torch.ones(2, 3), torch.full((2, 3), 2.0)])
    torch._foreach_addcmul_([absent, here], [here, here], [here, here], scalars=[1.0, 0.0])
    torch._foreach_mul_([absent], 2.0)
    assert torch.equal(here, torch.full((2, 3), 3.0))
    assert not zeros.any() and absent.grad is None
    with pytest.raises(RuntimeError, match=r"reads, in Python, a number that depends on `layers\.1\.weight`"):
        bool((torch.ones(2, 3) + absent).any())
    with unmarked():  # while only shapes are wanted
        assert torch.equal(torch.ones(2, 3) + absent, torch.ones(2, 3))


def test_behind_a_backward_of_the_step_a_gradient_of_another_stage_answers_as_in_a_hook():
    def phase(*, lists: bool = False) -> Phase:
        return Phase.HOOK if lists else Phase.STEP

    absent = make_absent(torch.zeros(2, 3), "layers.1.weight", phase)
    gradient = absent.grad
    assert gradient is not None and gradient.shape == (2, 3) and gradient.clamp_(0, 1) is gradient
    absent.grad = gradient * 0.5
    with pytest.raises(RuntimeError, match=r"`layers\.1\.weight` was read by `__float__`"):
        float(gradient.norm())
    with pytest.raises(RuntimeError, match=r"`layers\.1\.weight` was written into another tensor by `copy_`"):
        torch.ones(2, 3).copy_(gradient)


def test_a_step_that_updates_a_target_network_is_told_where_to_do_it():
    unread = torch.zeros(3).as_subclass(Unread)
    unread.module = "net"
    with pytest.raises(RuntimeError, match=r"parameters of `net` into other tensors \(`lerp_`\).*`on_train_batch_end`"):
        torch.ones(3).lerp_(unread, 0.1)
    with pytest.raises(
        RuntimeError, match=r"the step read all parameters of `net`.*set flags .* in `on_train_batch_start`"
    ):
        unread.square()


@pytest.mark.parametrize("step", [True, False])
def test_a_split_table_of_another_stage_has_the_part_of_a_rank_in_its_own_forward(step):
    def phase(*, lists: bool = False) -> Phase:
        return Phase.STEP

    table = nn.Embedding(3, 8)
    del table.weight
    vars(table)["weight"] = make_absent(torch.zeros(3, 4), "bias.weight", phase, shape=(3, 8))
    with contextlib.nullcontext() if step else unmarked():
        assert table(torch.zeros(2, dtype=torch.long)).shape == (2, 4)
        assert table.weight.shape == (3, 8) and (table.weight + 0).shape == (3, 8)
