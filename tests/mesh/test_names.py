"""Dotted names: what lies in what, and the innermost part that holds a name."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_megatron.mesh.parts.names import (
    Parts,
    called,
    leaf_of,
    lies_in,
    module_called,
    outwards,
    owner_and_leaf,
    parent,
)


def test_a_name_is_held_by_each_module_around_it() -> None:
    assert list(outwards("a.b.c")) == ["a.b.c", "a.b", "a", ""]
    assert list(outwards("")) == [""]
    assert [parent(name) for name in ("a.b.c", "a", "")] == ["a.b", "", ""]
    assert [leaf_of(name) for name in ("a.b.c", "a", "")] == ["c", "a", ""]


def test_what_a_name_calls_is_found_with_its_module() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(1, 1)))
    assert owner_and_leaf(net, "0.0.weight") == (net[0][0], "weight")
    assert called(net, "0.0.weight") is net[0][0].weight and called(net, "0") is net[0]
    assert module_called(net, "0.0") is net[0][0] and module_called(net, "0.0.weight") is None
    with pytest.raises(AttributeError):
        owner_and_leaf(net, "1.weight")


@pytest.mark.parametrize(
    ("name", "part", "inside"),
    [
        ("layers.1", "layers.1", True),
        ("layers.1.weight", "layers.1", True),
        ("layers.10.weight", "layers.1", False),
        ("layers", "layers.1", False),
        ("net.layers.1", "layers.1", False),
        ("anything", "", True),
        ("", "", True),
        ("", "layers", False),
    ],
)
def test_a_name_lies_in_a_part_by_whole_words_from_the_start(name: str, part: str, inside: bool) -> None:
    assert lies_in(name, part) is inside
    assert (name in Parts([part])) is inside
    assert Parts([part]).of(name) == (part if inside else None)


def test_of_parts_inside_each_other_the_innermost_is_meant() -> None:
    parts = Parts(["net", "net.layers.1", "net.layers.1.mlp", "head.weight"])
    assert parts.of("net.layers.1.mlp.bias") == "net.layers.1.mlp"
    assert parts.of("net.layers.1.norm") == "net.layers.1"
    assert parts.of("net.layers.10") == "net"
    assert parts.of("head.weight") == "head.weight"
    assert parts.of("head") is None and "head" not in parts
    assert "anything" not in Parts([])
