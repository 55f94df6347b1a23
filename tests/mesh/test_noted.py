"""Values of tensors go with their tensors, and are no other tensor's."""

from __future__ import annotations

import gc

import torch

from lightning_megatron.mesh.parts.noted import TensorNotes


def test_values_are_found_by_which_tensor_it_is_and_go_with_it() -> None:
    notes, first, second = TensorNotes[str](), torch.ones(2), torch.ones(2)
    notes[first] = "first"
    assert notes.get(first) == "first" and first in notes
    assert notes.get(second) is None and second not in notes
    notes[first] = "again"
    assert notes.get(first) == "again" and len(notes) == 1
    del first
    gc.collect()
    assert len(notes) == 0


def test_a_tensor_in_the_place_of_one_that_is_gone_has_no_value() -> None:
    notes = TensorNotes[int]()
    for number in range(200):
        tensor = torch.empty(1)
        assert notes.get(tensor) is None
        notes[tensor] = number
        del tensor
    assert len(notes) == 0
