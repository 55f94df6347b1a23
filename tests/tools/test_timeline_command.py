"""``lightning-megatron timeline`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lightning_megatron.tools.commands.cli import app


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["timeline", *arguments])


def test_json_has_the_figures_and_the_instructions() -> None:
    result = run("--schedule", "interleaved", "--stages", "4", "--chunks", "2", "--micro-batches", "8", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["makespan"] == 57
    assert found["bubble_fraction"] == 3 / 16
    assert found["peak_activations"] == [11, 9, 7, 5]
    assert len(found["instructions"]) == 4
    assert found["instructions"][0][:5] == ["F0.0", "F1.0", "F2.0", "F3.0", "F0.1"]
    assert all(len(steps) == 2 * 2 * 8 for steps in found["instructions"])


def test_costs_are_options() -> None:
    arguments = ["--schedule", "zb-h1", "--stages", "3", "--micro-batches", "6", "--json"]
    found = json.loads(run(*arguments, "--forward", "2", "--backward-input", "3", "--backward-weight", "2").stdout)
    assert found["makespan"] == 6 * 7 + 2 * (2 + 3 - 2)
    slower = json.loads(run(*arguments, "--p2p", "0.5").stdout)
    assert slower["makespan"] > json.loads(run(*arguments).stdout)["makespan"]


def test_text_shows_the_grid() -> None:
    result = run("--schedule", "1f1b", "--stages", "2", "--micro-batches", "2", "--backward-weight", "0")
    assert result.exit_code == 0
    assert "1f1b: 2 stages, 2 micro-batches, makespan 6, bubble 50.0%" in result.stdout
    assert "stage 0  F0 F1 .. B0 .. B1" in result.stdout


def test_a_picture_and_a_trace_are_written(tmp_path: Path) -> None:
    picture, trace = tmp_path / "a.svg", tmp_path / "a.json"
    result = run("--schedule", "zb-v", "--stages", "3", "--svg", str(picture), "--trace", str(trace))
    assert result.exit_code == 0
    assert picture.read_text().startswith("<svg")
    result = run("--schedule", "zb-v", "--stages", "3", "--png", str(tmp_path / "a.png"))
    assert f"wrote {tmp_path / 'a.png'}" in result.output.replace("\n", "")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(trace.read_text())["traceEvents"]) > 3 * 8


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    result = run("--svg", str(tmp_path / "absent" / "a.svg"))
    assert result.exit_code == 2
    assert "could not write" in result.output and "a.svg" in result.output.replace("\n", "")


def test_wrong_arguments_end_with_a_message_and_no_traceback() -> None:
    result = run("--schedule", "zb-v", "--chunks", "3")
    assert result.exit_code == 2
    assert "puts 2 chunk(s) on each stage, got chunks=3" in result.output
    assert "Traceback" not in result.output


def test_a_schedule_of_ones_own_is_checked_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_schedules.py").write_text(
        "def crossed(stages, chunks, micro_batches):\n    return [['F0', 'B0', 'F1', 'B1'], ['F1', 'B1', 'F0', 'B0']]\n"
    )
    monkeypatch.chdir(tmp_path)
    result = run("--schedule", "my_schedules:crossed", "--stages", "2", "--micro-batches", "2")
    assert result.exit_code == 2
    assert "stage 0  F0  !B0 F1  B1" in result.output
    missing = run("--schedule", "my_schedules:absent")
    assert missing.exit_code == 2
    assert "absent" in missing.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--forward", "nan"), "`--forward nan` must be a finite time"),
        (("--p2p", "-1"), "`--p2p -1.0` must be a finite time"),
        (("--schedule", "os:getcwd"), "'getcwd' is not a function (stages, chunks, micro_batches)"),
        (("--stages", "1000", "--micro-batches", "10000"), "10,000,000 passes, of which at most 200,000"),
    ],
)
def test_what_cannot_be_simulated_is_said_at_once(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert message in result.output


def test_one_of_a_kind_has_no_plural() -> None:
    said = CliRunner().invoke(app, ["timeline", "--stages", "1", "--micro-batches", "1"]).stdout
    assert "1f1b: 1 stage, 1 micro-batch, makespan 3" in said and "per stage 1 chunk\n" in said
