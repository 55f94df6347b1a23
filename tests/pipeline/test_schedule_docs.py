"""The figures and grids of ``docs/schedules.md`` are those that the simulator gives."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_megatron.pipeline.schedule import make_schedule
from lightning_megatron.pipeline.timeline import Costs, ScheduleError, simulate
from lightning_megatron.tools.commands.cli import app

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "schedules.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"```\n\$ lightning-megatron (.*?)\n(.*?)```", PAGE, re.DOTALL)
ROWS = re.findall(r"\| `([\w-]+)`((?:, \w+=\d+)*) \| (\S+)% \| (\S+)% \| (\S+) \| (\S+) \|", PAGE)


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_each_command_prints_what_the_page_shows(command: str, output: str) -> None:
    assert CliRunner().invoke(app, shlex.split(command)).stdout == output


def test_the_table_is_the_simulators() -> None:
    assert len(ROWS) == 9
    for name, options, bubble, step_bubble, makespan, peak in ROWS:
        schedule = make_schedule(name, 8, 32, **{key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", options)})
        found = simulate(schedule, Costs.uniform(schedule.virtual_stages, *[1 / schedule.chunks] * 3))
        assert f"{found.bubble_fraction:.1%} {found.step_bubble_fraction:.1%}" == f"{bubble}% {step_bubble}%"
        assert f"{found.makespan:g} {max(found.peak_activations) / schedule.chunks:g}" == f"{makespan} {peak}"


def test_the_examples_run_and_the_faulty_one_is_refused_as_shown(capsys: pytest.CaptureFixture[str]) -> None:
    costs_example, own_example = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(costs_example, {})
    assert "stage 2" in capsys.readouterr().out
    namespace: dict[str, Callable[[int, int, int], list[list[str]]]] = {}
    exec(own_example, namespace)
    with pytest.raises(ScheduleError) as caught:
        make_schedule(namespace["one_by_one"], 3, 3)
    assert f"```\n{caught.value}\n```" in PAGE


def test_the_pictures_are_there() -> None:
    pictures = re.findall(r"\]\((images/.*?\.svg)\)", PAGE)
    assert len(pictures) == 3
    assert all((DOCS / picture).read_text(encoding="utf-8").startswith("<svg") for picture in pictures)
