"""Every block of code and every command of the documentation runs, or says beside it why it does not.

Python is executed page by page, in one process, with a Trainer that starts no other; what is to be trained for real is
a tutorial, whose blocks make one script. A block that cannot run has ``<!-- not run: reason -->`` above it.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer

from lightning_megatron.tools.commands.cli import app
from tests.examples.script import run_in_workers
from tests.unit.page_names import CHECKS, names

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>.*?) -->\n+)?^```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.M | re.S)
KINDS = {"python", "py", "bash", "yaml", "text", ""}


def blocks(page: Path, *kinds: str) -> list[tuple[int, str, str]]:
    """Line, body, and why it is not run, of the blocks of some kinds."""
    text = page.read_text(encoding="utf-8")
    found = [found for found in BLOCK.finditer(text) if found["kind"] in kinds]
    return [(text.count("\n", 0, one.start("body")), one["body"], one["reason"] or "") for one in found]


def test_blocks_are_of_kinds_that_are_known_and_few_are_not_run() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert {found["kind"] for found in BLOCK.finditer(text)} <= KINDS, page
        assert text.count("<!-- not run") == sum(bool(found["reason"]) for found in BLOCK.finditer(text)), page
    python = [one for page in PAGES for one in blocks(page, "python", "py")]
    assert len(python) > 25 and sum(bool(reason) for *_, reason in python) <= 4


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python", "py")], ids=lambda page: page.stem)
@pytest.mark.filterwarnings("ignore")
def test_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("lightning.Trainer", "lightning.pytorch.Trainer"):
        monkeypatch.setattr(place, names(page)["Trainer"])
    found = names(page)
    for line, body, reason in blocks(page, "python", "py"):
        if not reason:
            exec(compile("\n" * line + body, str(page), "exec"), found)
    if page.name in CHECKS:
        CHECKS[page.name](found, tmp_path)


@pytest.mark.wide
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_trains(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("\n".join(body for _, body, reason in blocks(page, "python") if not reason), "utf-8")
    devices = re.search(r"devices=(\d+)", script.read_text())
    assert devices is not None
    run = run_in_workers(str(script), tmp_path, processes=int(devices[1]))
    assert run.code == 0, run.output
    assert "Total FLOPs: 0" not in run.output
    for wanted in re.findall(r"^# prints: (.*)$", script.read_text(), re.M):
        assert wanted in run.output, run.output


def commands(page: Path) -> list[str]:
    """Commands in blocks and in lines of text, without what is shown of their output."""
    text = page.read_text(encoding="utf-8")
    found = [line for _, body, _ in blocks(page, "bash") for line in body.splitlines()]
    shown = re.findall(r"^\$ (.*)$|^(lightning-megatron .*?)(?:  +.*)?$", text, re.M)
    found += [prompted or other for prompted, other in shown]
    return found + [
        " ".join(one.split()) for one in re.findall(r"`((?:lightning-megatron|python|mkdocs) [^`]+)`", text)
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_commands_of_a_page_exist_and_take_their_options(page: Path) -> None:
    for command in commands(page):
        for part in re.split(r"&&|\|", command):
            _check(shlex.split(part, comments=True), command)


def _check(words: list[str], command: str) -> None:
    words = words[1:] if words[:1] == ["export"] else words
    words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
    if not words:
        return
    program, rest = Path(words[0]).name, words[1:]
    if program == "lightning-megatron":
        _check_own(rest, command)
    elif program == "python" and rest[:1] == ["-m"]:
        assert rest[1] in ("venv", "pytest", "build", "mkdocs") or find_spec(rest[1]) is not None, command
    elif program == "python":
        known = {"train.py"}  # the reader's
        assert rest[0] in known or (ROOT / rest[0]).is_file() or rest[0].startswith("-"), command
        _check_options(ROOT / rest[0], [word for word in rest[1:] if word.startswith("--")], command)
    elif "/" in words[0] and program not in ("pip", "python"):
        assert (ROOT / words[0]).is_file() or words[0].startswith("."), command
    else:
        assert shutil.which(program) or (Path(sys.executable).parent / program).exists() or program == "srun", command


def _check_options(script: Path, options: list[str], command: str) -> None:
    text = script.read_text(encoding="utf-8") if script.is_file() else ""
    assert all(f'"{option.partition("=")[0]}"' in text for option in options if text), command


def _check_own(words: list[str], command: str) -> None:
    """The command and its options are there; a command may be named without what it needs."""
    at: Any = typer.main.get_command(app)
    while hasattr(at, "commands") and words and not words[0].startswith("-"):
        assert words[0] in at.commands, command
        at, words = at.commands[words[0]], words[1:]
    known = {name for parameter in at.params for name in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help", "-h", "--install-completion", "--show-completion"}
    assert {word.partition("=")[0] for word in words if word.startswith("-")} <= known, command
