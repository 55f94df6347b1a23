"""Weights of other stages, as a step of the module's own code meets them."""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.pipeline.elsewhere.absent import make_absent
from lightning_megatron.pipeline.elsewhere.away import unmarked
from lightning_megatron.pipeline.elsewhere.presence import Phase


def test_writing_into_a_weight_of_another_stage_does_nothing_in_a_step_either():
    zeros = torch.zeros(()).expand(2, 3)
    absent = make_absent(zeros, "layers.1.weight", lambda: Phase.STEP)
    assert absent.div_(2) is absent
    absent[0] = 1
    absent += 1
    assert not zeros.any()
    with pytest.raises(RuntimeError, match=r"reads, in Python, a number that depends on `layers\.1\.weight`"):
        bool((torch.ones(2, 3) + absent).any())
    with unmarked():  # while only shapes are wanted
        assert torch.equal(torch.ones(2, 3) + absent, torch.ones(2, 3))
