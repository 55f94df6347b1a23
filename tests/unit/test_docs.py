"""The documentation speaks of this code: its messages, arguments, files and links exist."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from lightning_megatron import MegatronStrategy
from tools import errors

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


HIDDEN = "…"  # a value, in the documentation and in what is read out of the code


def messages() -> list[str]:
    """Every string of the package as a user would see it, those that stand side by side joined as Python joins them."""
    found = []
    for file in sorted((ROOT / "lightning_megatron").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                pieces = [part.value if isinstance(part, ast.Constant) else HIDDEN for part in node.values]
                found.append("".join(map(str, pieces)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def documented_messages() -> list[list[str]]:
    """The literal pieces, in order, of every message in the tables of ``errors.md``."""
    text = errors.PAGE.read_text(encoding="utf-8").partition(errors.START)[0]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    quotes = [re.findall(r"`([^`]+)`", cell) for cell in cells]
    return [[piece.strip() for quote in row for piece in quote.split(HIDDEN) if piece.strip()] for row in quotes]


def is_said(pieces: list[str], message: str) -> bool:
    """Whether one message has all the pieces in their order; a name or an assignment may be one of its values."""
    place = 0
    for piece in pieces:
        at = message.find(piece, place)
        if at < 0 and re.fullmatch(r"\w+[_=]\w+", piece) and len(pieces) > 1:
            at, piece = message.find(HIDDEN, place), HIDDEN
        if at < 0:
            return False
        place = at + len(piece)
    return True


def test_every_message_that_the_code_raises_has_a_row_in_the_error_guide() -> None:
    rows, by_hand = set(errors.PAGE.read_text(encoding="utf-8").splitlines()), documented_messages()
    texts = [text for room in errors.messages().values() for text in room]
    assert len(texts) > 290
    missing = [
        text for text in texts if errors.row(text) not in rows and not any(is_said(row, text) for row in by_hand)
    ]
    assert missing == [], "write a row in docs/errors.md, or run `python -m tools.errors`"


def test_the_list_of_messages_is_the_one_that_its_tool_writes() -> None:
    page = errors.PAGE.read_text(encoding="utf-8")
    assert errors.page_with_table(page) == page, "run `python -m tools.errors`"


FAULTS = ("check.py", "rules.py", "transfers.py")  # return what is wrong with a schedule, which one error says


def faults_of_schedules() -> list[str]:
    """What a schedule may be refused for: returned texts, and those that are put together as `message` before."""
    found = []
    for name in FAULTS:
        module = ast.parse((errors.PACKAGE / "pipeline" / "schedules" / name).read_text(encoding="utf-8"))
        for function in [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]:
            for node in ast.walk(function):
                is_message = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "message"
                value = node.value if is_message or isinstance(node, ast.Return) else None
                value = value.elts[0] if isinstance(value, ast.Tuple) else value
                found += errors.text_of(value, function, module) if isinstance(value, ast.JoinedStr | ast.IfExp) else []
    return [" ".join(text.split()) for text in dict.fromkeys(found)]


def test_every_fault_of_a_schedule_has_a_row_in_the_error_guide() -> None:
    faults = [text for text in faults_of_schedules() if len(re.findall(r"[a-z]+", text)) > 2]
    assert len(faults) > 16
    assert [text for text in faults if not any(is_said(row, text) for row in documented_messages())] == []


def test_messages_are_read_through_names_functions_and_conditions(tmp_path: Path) -> None:
    path = tmp_path / "raising.py"
    path.write_text(
        "def told(x):\n    if x:\n        return f'the first of {x} failed'\n    return 'the second ' + 'failed'\n"
        "def act(x):\n    advice = f'use at most {x} of them'\n    if x > 3:\n        raise ValueError(told(x))\n"
        "    raise RuntimeError(f'`x={x!r}` is too large; {advice}' if x else 'nothing was given')\n"
        "def _made(x):\n    return RuntimeError(f'{x} was made by a function')\n"
        "def more(x):\n    raise _made(x)\n    raise ValueError('; '.join(told(each) for each in x))\n"
    )
    assert set(errors.raised(path)) == {
        "the first of … failed",
        "the second failed",
        "`x=…` is too large; …",
        "nothing was given",
        "… was made by a function",
    }


def test_messages_are_read_through_functions_of_other_modules() -> None:
    path = errors.PACKAGE / "strategy" / "assembly" / "layer_split.py"
    assert "by an earlier run and holds this rank's part" in " ".join(errors.raised(path)), (
        "made by a function of another module"
    )


def test_every_message_in_the_error_guide_is_one_that_the_code_gives() -> None:
    said, documented = messages(), documented_messages()
    assert len(documented) > 30
    assert [row for row in documented if not any(is_said(row, message) for message in said)] == []


def test_words_of_several_messages_make_no_message() -> None:
    said = ["`size` needs a list", f"{HIDDEN} devices but the Trainer has {HIDDEN}"]
    assert not any(is_said(["needs", "devices but the Trainer has"], message) for message in said)
    assert is_said(["sequence_parallel=True", "needs a list"], f"{HIDDEN} needs a list")
    assert not is_said(["needs a list", "of layers"], "of layers needs a list")


def test_files_named_in_contributing_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"\| `([\w/]+(?:\.py)?)`", text)
    assert len(named) > 5
    assert not [name for name in named if not (ROOT / "lightning_megatron" / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_and_to_files_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    local = [link for link in links if not link.startswith("http")]
    assert not [link for link in local if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_arguments_shown_for_the_strategy_are_arguments_it_takes(page: Path) -> None:
    known = set(inspect.signature(MegatronStrategy.__init__).parameters)
    text = page.read_text(encoding="utf-8")
    calls = re.findall(r"MegatronStrategy\(((?:[^()]|\([^()]*\))*)\)", text)
    used = {name for call in calls for name in re.findall(r"(?:^|[,\s])([a-z_]+)=", call)}
    assert used <= known
