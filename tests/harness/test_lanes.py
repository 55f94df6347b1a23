"""Tests side by side: everything runs once, reports are those of pytest, and a process that dies costs one test."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

LANES = Path(__file__).with_name("lanes.py")  # by its path: the package around it would import torch
CONFTEST = f"""
import sys
from importlib import util

spec = util.spec_from_file_location("lanes", {str(LANES)!r})
sys.modules["lanes"] = lanes = util.module_from_spec(spec)
spec.loader.exec_module(lanes)

def pytest_configure(config):
    config.addinivalue_line("markers", "alone: last")
    config.pluginmanager.register(lanes.SideBySide(2))
"""
TESTS = """
import os
import time
from pathlib import Path
import pytest

RAN = Path(__file__).parent / "ran"

@pytest.fixture(scope="module")
def shared():
    return os.getpid()

def note(number, start):
    with RAN.open("a") as file:
        file.write(f"{number} {os.getpid()} {start} {time.monotonic()}\\n")

@pytest.mark.parametrize("number", range(30))
def test_one(number, tmp_path):
    start = time.monotonic()
    time.sleep(0.01)
    note(number, start)
    print("printed by", number)
    assert number != 7
    if number == 13:
        os._exit(5)
    if number == 20:
        pytest.skip("twenty")

@pytest.mark.alone
def test_alone():
    start = time.monotonic()
    time.sleep(0.1)
    note("alone", start)
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command_of(folder, *options), capture_output=True, text=True, cwd=folder, timeout=120, check=False
    )


def command_of(folder: Path, *options: str) -> list[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_some.py").write_text(TESTS)
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={folder}", *options, str(folder)]


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ran(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "ran").read_text().splitlines()]


def test_every_test_runs_once_in_one_of_the_lanes_and_is_reported(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert re.search(r"2 failed, 28 passed, 1 skipped", done.stdout), done.stdout + done.stderr
    assert "the process that ran it ended with exit code 5" in done.stdout
    assert "printed by 7" in done.stdout and "printed by 8" not in done.stdout
    notes = ran(tmp_path)
    assert sorted(note[0] for note in notes) == sorted([*map(str, range(30)), "alone"])
    assert len({note[1] for note in notes}) >= 3, "two lanes and the one that took a dead one's place"


def test_a_test_that_measures_runs_when_no_other_does(tmp_path: Path) -> None:
    run(tmp_path)
    *others, (_, _, start, _) = sorted(ran(tmp_path), key=lambda note: note[0] == "alone")
    assert all(float(end) <= float(start) for *_, end in others)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("options", [("--pdb",), ("-s",), ("-k", "test_one and (1 or 2)")])
def test_one_process_runs_them_where_a_terminal_or_few_tests_ask_for_it(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    done = run(
        tmp_path, *options, "--deselect", "test_some.py::test_one[13]", "--deselect", "test_some.py::test_one[7]"
    )
    assert done.returncode == 0, done.stdout
    assert len({note[1] for note in ran(tmp_path)}) == 1


def test_the_first_failure_ends_the_session_on_request(tmp_path: Path) -> None:
    done = run(tmp_path, "-x")
    assert "stopping after 1 failures" in done.stdout and done.returncode == 1, done.stdout + done.stderr
    assert "INTERNALERROR" not in done.stdout + done.stderr


def test_lanes_end_with_a_session_that_is_killed(tmp_path: Path) -> None:
    session = subprocess.Popen(command_of(tmp_path, "-k", "test_one"), stdout=subprocess.DEVNULL, cwd=tmp_path)
    end = time.monotonic() + 60
    while not (tmp_path / "ran").exists() or len({note[1] for note in ran(tmp_path)}) < 2:
        assert time.monotonic() < end and session.poll() is None
        time.sleep(0.01)
    session.kill()
    session.wait()
    while any(is_alive(int(note[1])) for note in ran(tmp_path)):
        assert time.monotonic() < end, "a lane lives on"
        time.sleep(0.1)
