"""Modules that mix tokens by hand, over context ranks alone and with stages or tensor ranks: the numbers of one."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.context_parallel.odd_modules import ENDS, MIXERS, train
from tests.harness import one_process, run_trainers

CP, PP, TP = (f"{axis}_parallel_size" for axis in ("context", "pipeline", "tensor"))
LAYOUTS = {"c2": {CP: 2}, "c3": {CP: 3}, "c2 pp2": {CP: 2, PP: 2}, "c2 tp2": {CP: 2, TP: 2}}
FIRST = (("InPlace", "c2", 7), ("ShownWeights", "c2 tp2", 7), ("TwoStreams", "c2 pp2", 7))
KINDS = (*MIXERS, *ENDS)
# Tokens that two ranks share evenly, and not: both over these alone, and over more ranks in turns.
LENGTHS = {
    (kind, layout): (7, 8) if layout == "c2" else ((7, 8)[(turn + at) % 2],)
    for (turn, kind), (at, layout) in itertools.product(enumerate(KINDS), enumerate(LAYOUTS))
    if not (layout == "c2 tp2" and kind in ("OverTokens", "Buckets"))  # whose execution is to be shown to plans
}
REST = [(*place, length) for place, lengths in LENGTHS.items() for length in lengths if (*place, length) not in FIRST]
ROWS = [*FIRST, *(pytest.param(*row, marks=pytest.mark.wide) for row in REST)]


@pytest.mark.parametrize(("kind", "layout", "length"), ROWS)
def test_a_module_that_mixes_tokens_by_hand_trains_as_in_one_process(kind, layout, length):
    wanted, arguments = one_process(train, kind, length, None), LAYOUTS[layout]
    size = arguments[CP] * arguments.get(PP, 1) * arguments.get(TP, 1)
    for outcome in run_trainers(train, kind, length, arguments, devices=size):
        for name, value in outcome.value.items():
            torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(wanted[name]), rtol=1e-9, atol=1e-9)
