"""Hooks as they were before a run of the user's step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_megatron.strategy.hooks.kept_hooks import HookTables, KeptHooks


def test_hooks_that_were_added_go_and_those_that_were_taken_off_come_back() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    seen: list[str] = []
    first = net[0].register_forward_hook(lambda *_: seen.append("first"))
    net[0].register_forward_hook(lambda *_: seen.append("second"))
    every, added = KeptHooks(HookTables(net)), KeptHooks(HookTables(net), lost=False)
    net[1].register_forward_hook(lambda *_, **__: seen.append("new"), with_kwargs=True)
    first.remove()
    added.put_back()
    net(torch.ones(1))
    assert seen == ["second"] and not net[1]._forward_hooks_with_kwargs
    every.put_back()
    net(torch.ones(1))
    assert seen == ["second", "first", "second"]


def test_in_a_step_the_modules_are_walked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, walks = nn.Sequential(nn.Linear(1, 1)), []
    tables = HookTables(net)
    every = tables.find
    monkeypatch.setattr(tables, "find", lambda: walks.append(1) or every())
    with tables.found_once():
        assert not walks  # many steps undo nothing
        for _ in range(3):
            KeptHooks(tables)
        assert len(walks) == 1
        handle = net[0].register_forward_hook(lambda *_: None)
        kept = KeptHooks(tables)
        handle.remove()
        kept.put_back()
        assert list(net[0]._forward_hooks) == [handle.id] and len(walks) == 1
    net.append(nn.Linear(1, 1))
    handle = net[1].register_forward_hook(lambda *_: None)
    with tables.found_once():
        kept = KeptHooks(tables)
        handle.remove()
        kept.put_back()
    assert list(net[1]._forward_hooks) == [handle.id]
