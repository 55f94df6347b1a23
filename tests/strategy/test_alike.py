"""Split over tensor ranks or not, training starts from the same logical weights, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_trainers
from tests.harness.remember import remembered
from tests.strategy.start_scenarios import peak, start


def run(layout: tuple[int, int], *args: Any) -> list[Any]:
    return [outcome.value for outcome in run_trainers(start, layout, *args, devices=layout[0] * layout[1])]


@remembered
def alone(*args: Any) -> dict[str, torch.Tensor]:
    whole: dict[str, torch.Tensor] = run((1, 1), *args)[0][0]
    return whole


def assert_identical(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(expected)
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
    matrices = [value for value in expected.values() if value.dim() == 2 and value.is_floating_point()]
    assert matrices and all(value.std() > 0 for value in matrices)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("kind", "late", "layout"),
    [
        ("drop_in", True, (2, 1)),
        ("drop_in", False, (2, 2)),
        ("gpt", True, (2, 2)),
        ("gpt2", True, (2, 2)),
        pytest.param("encoder", True, (2, 1), marks=pytest.mark.wide),
        pytest.param("llama", True, (2, 1), marks=pytest.mark.wide),
        pytest.param("gpt2", False, (4, 1), marks=pytest.mark.wide),
        pytest.param("llama", True, (4, 1), marks=pytest.mark.wide),
    ],
)
def test_with_a_seed_split_and_whole_modules_start_bit_for_bit_alike(kind: str, late: bool, layout: Any) -> None:
    assert_identical(run(layout, kind, late, True, None)[0][0], alone(kind, late, True, None))


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("gpt", (2, 2)),
        ("encoder", (1, 2)),
        ("gpt2", (1, 2)),
        pytest.param("drop_in", (2, 2), marks=pytest.mark.wide),
        pytest.param("llama", (2, 2), marks=pytest.mark.wide),
    ],
)
def test_built_without_memory_a_module_starts_as_if_it_had_been_built_whole(kind: str, layout: Any) -> None:
    """Constructors' own draws, copies of one layer, and Hugging Face's initialisation."""
    assert_identical(run(layout, kind, True, True, None)[0][0], alone(kind, True, True, None, "cpu"))


MIB = 2**20


@pytest.mark.wide
@pytest.mark.parametrize(("layout", "in_hook"), [((1, 2), True), pytest.param((2, 2), False, marks=pytest.mark.wide)])
def test_a_process_needs_its_part_and_a_tensor_or_two_to_start(layout: tuple[int, int], in_hook: bool) -> None:
    """32 layers of 8 MiB: 256 MiB in a process that builds all of it."""
    ranks = run_trainers(peak, layout, in_hook, devices=layout[0] * layout[1])
    for outcome in ranks:
        own = 256 * MIB // (layout[0] * layout[1])
        assert own < outcome.value[0] < own + 64 * MIB, outcome.value[0] / MIB
    assert ranks[0].value[1]
    assert all(weight.std() > 0 for weight in ranks[0].value[1].values())


def test_modules_above_a_layer_may_change_what_it_drew() -> None:
    weights = alone("gpt2", True, True, None)  # output projections are drawn smaller, by the number of layers
    narrow, wide = (
        torch.cat([value.flatten() for name, value in weights.items() if name.endswith(kind)]).std()
        for kind in ("c_proj.weight", "c_attn.weight")
    )
    assert narrow / wide == pytest.approx(8**-0.5, rel=0.1)


@pytest.mark.parametrize("late", [False, True])
def test_without_a_seed_all_ranks_start_from_the_weights_of_the_first(late: bool) -> None:
    values = run((2, 1), "drop_in", late, False, None)
    expected = alone("drop_in", late, True, None)  # the first rank's draw
    assert_identical(values[0][0], expected)
    for _, seen in values:  # by a hook, which sees split weights whole
        assert_identical(seen, expected)


def test_loaded_weights_are_split_as_they_are(tmp_path: Path) -> None:
    saved = {
        name: torch.randn_like(value.float()).double() for name, value in alone("drop_in", False, True, None).items()
    }
    torch.save(saved, tmp_path / "weights.pt")
    for layout in ((1, 1), (2, 1)):
        assert_identical(run(layout, "drop_in", False, True, str(tmp_path / "weights.pt"))[0][0], saved)
