"""Python values between ranks: everyone's, one rank's, nobody's; over the world, a part of it, and one rank alone."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from lightning_megatron.mesh.messages import collectives, objects
from tests.harness import run_on_mesh, run_ranks


@pytest.mark.parametrize("value", [0, "", [], {"a": torch.arange(3)}, (1.5, None), b"\0" * 5], ids=repr)
def test_a_value_comes_back_from_its_bytes(value: Any) -> None:
    data = objects.encode(value)
    assert data.dtype == torch.uint8 and data.numel() > 0
    assert repr(objects.decode(data)) == repr(value)
    assert repr(objects.decode(torch.cat([data, data.new_zeros(3)]))) == repr(value)  # as padded


def test_nothing_has_no_bytes() -> None:
    assert objects.encode(None).numel() == 0
    assert objects.decode(objects.encode(None)) is None


def test_without_other_ranks_values_stay_the_objects_they_are() -> None:
    value = object()
    assert objects.gather(value) == [value] == objects.gather_to(value, 0)
    assert objects.broadcast(value) is value


def _values(mesh: DeviceMesh) -> dict[str, Any]:
    rank = distributed.get_rank()
    own = {"rank": rank, "long": "x" * 1000 * rank}
    small = {"rank": rank, "tensor": torch.arange(2)}
    return {
        "small": (objects.gather(rank), objects.gather_to(rank, 1), objects.broadcast(rank, 2)),
        "edges": [objects.gather(b"x" * (length + rank)) for length in range(220, 240)],
        "tensors": objects.gather(small)[2]["tensor"].tolist(),
        "all": objects.gather(own),
        "on 2": objects.gather_to(own, 2),
        "from 1": objects.broadcast(own, 1),
        "some": objects.gather(own if rank == 2 else None),
        "some on 0": objects.gather_to([] if rank == 1 else None, 0),
        "nobody": (objects.gather(None), objects.gather_to(None, 1), objects.broadcast(None, 2)),
        "nothing of others": objects.broadcast(b"" if rank == 2 else lambda: "cannot be pickled", 2),
    }


def test_values_of_three_ranks() -> None:
    results = run_on_mesh(_values, data=3)
    own = [{"rank": rank, "long": "x" * 1000 * rank} for rank in range(3)]
    for rank, found in enumerate(results):
        assert found["all"] == own
        assert found["small"] == ([0, 1, 2], [0, 1, 2] if rank == 1 else None, 2)
        assert found["edges"] == [[b"x" * (length + other) for other in range(3)] for length in range(220, 240)]
        assert found["tensors"] == [0, 1]
        assert found["on 2"] == (own if rank == 2 else None)
        assert found["from 1"] == own[1]
        assert found["some"] == [None, None, own[2]]
        assert found["some on 0"] == ([None, [], None] if rank == 0 else None)
        assert found["nobody"] == ([None] * 3, [None] * 3 if rank == 1 else None, None)
        assert found["nothing of others"] == b""


def _values_of_groups(mesh: DeviceMesh) -> list[Any]:
    rank, group = distributed.get_rank(), mesh["pipeline_parallel"].get_group()
    last = distributed.get_global_rank(group, 1)
    return [objects.gather(rank, group), objects.gather_to(rank, last, group), objects.broadcast(rank, last, group)]


def test_groups_talk_side_by_side_and_name_ranks_of_the_world() -> None:
    results = run_on_mesh(_values_of_groups, pipeline=2, tensor=2)
    assert results == [
        [[0, 2], None, 2],
        [[1, 3], None, 3],
        [[0, 2], [0, 2], 2],
        [[1, 3], [1, 3], 3],
    ]


@run_ranks(data=2)
def test_if_all_have_little_or_nothing_one_collective_is_enough(mesh: DeviceMesh) -> None:
    names = ("all_gather", "gather", "broadcast")
    spies = {name: mock.Mock(side_effect=getattr(distributed, name)) for name in names}
    with mock.patch.multiple(distributed, **spies):
        for ask, calls in (
            (objects.gather, [2, 0, 0]),
            (lambda value: objects.gather_to(value, 0), [4, 0, 0]),
            (objects.broadcast, [4, 0, 2]),
        ):
            ask(None)
            ask({"little": 1})
            assert [spies[name].call_count for name in names] == calls
        objects.gather("x" * 249)
        assert spies["all_gather"].call_count == 6


class _Group:
    def __init__(self, *kinds: str) -> None:
        self._device_types = [torch.device(kind) for kind in kinds]


def test_bytes_travel_on_a_device_that_the_backend_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for kinds, expected in ((("cpu",), "cpu"), (("cpu", "cuda"), "cpu"), (("cuda",), "cuda:3"), ((), "cpu")):
        assert objects.device_of(_Group(*kinds)) == torch.device(expected)  # type: ignore[arg-type]


def test_weights_of_the_cpu_travel_on_a_device_that_the_backend_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    monkeypatch.setattr(collectives, "device_of", lambda group: torch.device("meta"))
    monkeypatch.setattr(distributed, "broadcast", lambda x, source, group: sent.append(x.device.type))
    with pytest.raises(NotImplementedError, match="meta"):  # a device without numbers has none to copy back
        collectives.raw_broadcast(torch.ones(2), 0, None)
    assert sent == ["meta"]
