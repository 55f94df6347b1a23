"""A piece of a tensor is a list of boxes: whatever the piece, cutting and joining must give the tensor back."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.mesh.parts.boxes import (
    ShardSpec,
    assemble,
    block_range,
    key_value_heads,
    packed_ranges,
    padded_vocabulary,
)


def test_packed_rows_of_two_ranks_are_the_rows_drawn_in_the_module_docstring():
    specs = [ShardSpec.along((12, 4), 0, packed_ranges((4, 4, 4), 2, rank)) for rank in range(2)]
    full = torch.arange(48.0).view(12, 4)
    assert specs[0].slice_full(full)[:, 0].tolist() == [0, 4, 16, 20, 32, 36]
    assert [box.local_offset for box in specs[1].boxes] == [0, 8, 16]
    assert torch.equal(assemble(specs, [spec.slice_full(full) for spec in specs]), full)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_blocks_along_any_dim_join_to_the_whole(dim, parts):
    full = torch.randn(6, 6, 6)
    specs = [ShardSpec.along(full.shape, dim, [block_range(6, parts, rank)]) for rank in range(parts)]
    assert torch.equal(assemble(specs, [spec.slice_full(full) for spec in specs]), full)


def test_padded_vocabulary_holds_the_real_rows_once_and_zeros_elsewhere():
    padded = padded_vocabulary(300, 3)
    assert padded == 384 and padded_vocabulary(50257, 2) == 50432
    full = torch.randn(300, 2)
    specs = [ShardSpec.along(full.shape, 0, [block_range(padded, 3, rank)]) for rank in range(3)]
    pieces = [spec.slice_full(full) for spec in specs]
    assert [spec.numel for spec in specs] == [256, 256, 88]
    assert pieces[2].shape == (128, 2) and pieces[2][44:].abs().sum() == 0
    assert torch.equal(assemble(specs, pieces), full)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(0, 2),
    st.integers(1, 3),
    st.lists(st.floats(0, 1), min_size=1, max_size=3),
)
def test_flat_ranges_of_every_slice_cover_it_exactly(sizes, dim, parts, cuts):
    dim %= len(sizes)
    sizes[dim] *= parts * 2
    full = torch.arange(float(torch.Size(sizes).numel())).view(sizes)
    specs, pieces = [], []
    for rank in range(parts):
        spec = ShardSpec.along(sizes, dim, packed_ranges((sizes[dim] // 2, sizes[dim] // 2), parts, rank))
        flat = spec.slice_full(full).reshape(-1)
        borders = sorted({0, flat.numel(), *(int(cut * flat.numel()) for cut in cuts)})
        for start, stop in itertools.pairwise(borders):
            specs.append(spec.flat_range(start, stop))
            pieces.append(flat[start:stop])
    assert sum(spec.numel for spec in specs) == full.numel()
    assert torch.equal(assemble(specs, pieces), full)


def test_missing_piece_is_reported():
    spec = ShardSpec.along((4, 4), 0, [(0, 2)])
    with pytest.raises(ValueError, match="8 elements"):
        assemble([spec], [torch.zeros(2, 4)])


def test_key_value_heads_follow_the_query_heads():
    assert [key_value_heads(8, 2, 2, rank) for rank in range(2)] == [(0,), (1,)]
    assert [key_value_heads(8, 2, 4, rank) for rank in range(4)] == [(0,), (0,), (1,), (1,)]
    assert [key_value_heads(6, 3, 2, rank) for rank in range(2)] == [(0, 0, 1), (1, 2, 2)]
    assert [key_value_heads(8, 4, 2, rank) for rank in range(2)] == [(0, 1), (2, 3)]
