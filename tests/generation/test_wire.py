"""Messages about what layers gave: equal numbers arrive, and one message is enough for what comes again and again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh.messages.collectives import Started
from lightning_megatron.pipeline.repeated.wire import Wire
from tests.harness import RankInfo, run_job

_DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.complex128)


class _Counted(Wire):
    """Counts its messages."""

    messages = 0

    def _start(self, data: Tensor, stage: int) -> Started:
        self.messages += 1
        return super()._start(data, stage)


def _values(turn: int) -> list[Any]:
    """What a loop gives in its ``turn``: units of other kinds and sizes, and a nest."""
    whole = torch.arange(12).view(3, 4) + turn
    found: list[Any] = [(whole % 3).to(dtype) for dtype in _DTYPES]
    found += [whole[:0].double(), torch.tensor(turn), whole.t(), {"a": whole.double(), "b": [None, turn]}]
    return [*found, torch.ones(2, 1 + turn % 2), torch.ones(3 if turn == 2 else 300_000)]


def told(info: RankInfo, turns: int, ahead: bool) -> list[int]:
    """Messages of each turn, in which both ranks tell each other the same."""
    address, store = f"tcp://127.0.0.1:{info.port}", info.meet()
    dist.init_process_group("gloo", init_method=address, rank=info.rank, world_size=info.world_size)
    del store
    assert dist.group.WORLD is not None
    wire, counts = _Counted(dist.group.WORLD, [0, 1], info.rank, torch.device("cpu"), ahead=ahead), []
    wire.begin()
    with torch.inference_mode():
        for turn in range(turns):
            before = wire.messages
            for unit, value in enumerate(_values(turn)):
                for stage in range(info.world_size):
                    if stage == info.rank:
                        wire.tell(unit, value, None, [])
                        continue
                    found, note = wire.hear(stage, unit, "layer", [])
                    torch.testing.assert_close(found, value, rtol=0, atol=0)
                    assert note is None
                    if isinstance(found, Tensor):
                        assert found.is_contiguous() and not found.is_inference() and found._base is None
            counts.append(wire.messages - before)
    wire.finish()
    wire.settle()
    dist.destroy_process_group()
    return counts


@pytest.mark.parametrize("ahead", [False, True])
def test_what_comes_again_is_one_message(ahead: bool) -> None:
    for outcome in run_job(told, 2, 4, ahead):
        # of each stage, twelve values with a header each. The first turn has a tensor behind each but the empty one;
        # later ones have that of the nest, and those that were larger than a mebibyte or smaller the time before
        assert outcome.value == [2 * (12 + 11 + more) for more in (1, -7, -9, -8)]
