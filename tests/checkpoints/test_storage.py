"""Rectangles of stored boxes, and who writes which: against tensors small enough to look at."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from lightning_megatron.checkpoints.files import storage
from lightning_megatron.checkpoints.files.storage import Place, SummedFile, read_part
from lightning_megatron.checkpoints.files.writers import Shares, share_out
from lightning_megatron.checkpoints.loading.pretrained import find_prefix


@pytest.mark.parametrize("worth", [1, 4096])
def test_any_rectangle_of_a_stored_box_is_read(worth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_WORTH_A_READ", worth)
    dice, full = random.Random(0), torch.arange(5 * 4 * 3, dtype=torch.int16).reshape(5, 4, 3)
    with (tmp_path / "file").open("wb") as file:
        summed = SummedFile(file)
        summed.write(torch.ones(3))
        start = summed.write(full)
    assert start == 64
    with (tmp_path / "file").open("rb") as file:
        for _ in range(50):
            offset = tuple(dice.randrange(size) for size in full.shape)
            extent = tuple(dice.randint(1, size - o) for o, size in zip(offset, full.shape, strict=True))
            part = read_part(file, Place("file", start), tuple(full.shape), full.dtype, offset, extent)
            slices = tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))
            assert torch.equal(part, full[slices])


def test_overlapping_boxes_are_shared_out_so_that_each_element_is_written_once() -> None:
    dice, shape = random.Random(1), (7, 9)
    for _ in range(30):
        held = [(0, ((0, 0), shape))] if dice.random() < 0.5 else [(0, ((0, 0), (4, 9))), (1, ((4, 0), (3, 9)))]
        for rank in range(4):
            offset = (dice.randrange(7), dice.randrange(9))
            held.append((rank, (offset, (dice.randint(1, 7 - offset[0]), dice.randint(1, 9 - offset[1])))))
        written = torch.zeros(shape, dtype=torch.int64)
        for rank, (offset, extent) in share_out(held, shape, 4, Shares([0] * 4)):
            assert any(_inside(offset, extent, box) for holder, box in held if holder == rank)
            written[offset[0] : offset[0] + extent[0], offset[1] : offset[1] + extent[1]] += 1
        assert bool((written == 1).all())


def _inside(offset: tuple[int, ...], extent: tuple[int, ...], box: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    pairs = zip(offset, extent, *box, strict=True)
    return all(o >= b and o + n <= b + m for o, n, b, m in pairs)


def test_a_tensor_with_a_part_on_no_rank_is_not_saved_in_silence() -> None:
    with pytest.raises(ValueError, match="6 of the 12 elements"):
        list(share_out([(0, ((0, 0), (2, 3))), (1, ((0, 0), (2, 3)))], (4, 3), 4, Shares([0, 0])))


@pytest.mark.parametrize(
    ("stored", "names", "expected"),
    [
        (["h.0.w", "wte.w"], ["net.h.0.w", "net.wte.w", "scale"], ("", "net.")),
        (["model.h.0.w", "model.wte.w", "head.w"], ["h.0.w", "wte.w"], ("model.", "")),
        (["h.0.w", "wte.w"], ["h.0.w", "wte.w"], ("", "")),
    ],
)
def test_the_start_of_names_is_found(stored: list[str], names: list[str], expected: tuple[str, str]) -> None:
    assert find_prefix(stored, names) == expected
