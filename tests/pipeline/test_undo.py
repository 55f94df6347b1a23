"""What user code has written is put back: values, what is inside of them, and what was not there before."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.pipeline.elsewhere.containers import MISSING, Container
from lightning_megatron.pipeline.elsewhere.undo import Change, Contents, Kept, Snapshot, is_equal, unchanged


def test_entries_are_put_back_with_what_is_inside_of_them() -> None:
    tensor, entries, line, names = torch.ones(2), [1], deque([1]), {"a"}
    table: dict[str, Any] = {"tensor": tensor, "entries": entries, "line": line, "names": names, "gone": 1, "number": 1}
    kept = Kept(table)
    tensor.zero_()
    entries.append(2)
    line.clear()
    names.add("b")
    table |= {"entries": [], "number": 2, "new": 3, "forward": 4}
    del table["gone"]
    assert is_equal(kept.earlier("tensor"), torch.ones(2)) and kept.earlier("new") is MISSING
    kept.put_back({"forward"})
    assert table.pop("forward") == 4 and table.keys() == {"tensor", "entries", "line", "names", "gone", "number"}
    assert table["tensor"] is tensor and tensor.tolist() == [1, 1] and table["entries"] is entries == [1]
    assert list(line) == [1] and names == {"a"} and table["number"] == 1


def test_single_entries_leave_the_others_alone() -> None:
    table = {"calls": 1, "other": 1}
    kept = [Kept(table, (key,)) for key in ("calls", "later")]
    table.update(calls=2, other=2, later=2)
    for each in kept:
        each.put_back()
    assert table == {"calls": 1, "other": 2}


def test_a_tensor_that_was_not_written_keeps_its_version() -> None:
    leaf = torch.ones(2, requires_grad=True)
    buffer = torch.ones(2)
    product = (leaf * buffer).sum()
    Contents.of_tensor(buffer).put_back()
    product.backward()
    assert leaf.grad is not None and Contents.of(torch.ones(1, device="meta")) is None and Contents.of(3) is None


def test_a_tensor_tells_whether_it_was_written() -> None:
    buffer, statistic = torch.ones(2), torch.ones(2)
    kept, watched, norms = Contents.of_tensor(buffer), Contents.of_tensor(buffer, copies=False), Contents.of(statistic)
    assert norms is not None and not kept.is_changed(buffer) and not watched.is_changed(buffer)
    buffer.add_(0)
    assert kept.is_touched(buffer) and not kept.is_changed(buffer) and watched.is_changed(buffer)
    assert not kept.is_changed(torch.ones(2)) and kept.is_changed(torch.ones(3)) and kept.is_changed(torch.zeros(2))
    statistic.fill_(3)
    torch._C._autograd._unsafe_set_version_counter((statistic,), (norms.version,))  # as a batch norm writes it
    assert not norms.is_changed(statistic) and norms.is_changed(statistic, uncounted=True)
    watched.put_back()
    watched.rewind()
    assert buffer._version == 1


def test_a_tensor_is_rewound_under_a_graph_that_holds_it() -> None:
    leaf, buffer = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
    product, kept = (leaf * buffer).sum(), Contents.of_tensor(buffer)
    buffer.zero_()
    kept.rewind()
    product.backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [3, 3]


def test_a_snapshot_tells_single_changes_and_takes_back_those_of_a_micro_batch() -> None:
    seen, weight = [1], torch.ones(1, requires_grad=True)
    table: dict[str, Any] = {"calls": 1, "total": torch.zeros(1), "same": 2}
    before = Snapshot([Container((), table), Container((), seen)])
    assert not before.compare()
    table["calls"] += 1
    table["total"] += 5
    table["loss"] = 2 * weight
    seen.append(2)
    changes = {(change.kind, change.key): change for change in before.compare()}
    assert changes.keys() == {("set", "calls"), ("set", "total"), ("set", "loss"), ("append", None)}
    assert changes["set", "total"].old.tolist() == [0] and changes["append", None].new == [2]
    before.take_back()
    assert table.keys() == {"calls", "total", "same"} and table["calls"] == 2 and seen == [1]


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(1)
        self.cache = x
        first = self.first
        del self.first
        self.first = first
        self.register_buffer("late", x, persistent=False)
        return self.second(self.first(x))


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_of_a_module_leaves_nothing_behind(fails: bool) -> None:
    module = Remembering()
    before, names = dict(module.__dict__), list(module._modules)
    try:
        with unchanged(module):
            module(torch.ones(2))
            assert [name for name, _ in module.named_children()] != names and module.seen == [1]
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert module.__dict__ == before and [name for name, _ in module.named_children()] == names
    assert module.count.item() == 0 and module.seen == [] and next(iter(module.state_dict())) == "count"
    assert list(module._buffers) == ["count"] and not hasattr(module, "cache")


def test_a_change_is_taken_back_unless_something_else_was_written_since() -> None:
    module = Remembering()
    container = Container((("module", ""),), module)
    change = Change(container, "set", "extra", MISSING, 1)
    container.put("extra", 1)
    change.take_back()
    assert not hasattr(module, "extra")
    container.put("extra", 1)
    container.put("extra", 2)
    change.take_back()
    assert module.extra == 2
    container.put("extra", MISSING)
    container.put("extra", MISSING)
    assert container.read("extra") is MISSING


def test_hooks_that_an_abstract_run_registers_go_with_the_note_that_they_are_there() -> None:
    net: Any = nn.Linear(1, 1)
    with unchanged(net):
        net.has_hooks = True
        net.register_forward_hook(lambda *_: None)
    assert not hasattr(net, "has_hooks") and not net._forward_hooks
