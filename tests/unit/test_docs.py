"""The documentation speaks of this code: its messages, arguments, files and links exist."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from lightning_megatron import MegatronStrategy

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


def spoken_strings() -> str:
    """All string literals of the package, those that stand side by side joined as Python joins them."""
    found = []
    for file in sorted((ROOT / "lightning_megatron").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                pieces = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(map(str, pieces)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def quoted_messages() -> list[str]:
    """The literal pieces of every message in the tables of ``errors.md``."""
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    quotes = [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell)]
    return [piece.strip() for quote in quotes for piece in quote.split("…") if piece.strip()]


def test_every_message_in_the_error_guide_is_one_that_the_code_gives() -> None:
    spoken = spoken_strings()
    missing = [piece for piece in quoted_messages() if piece not in spoken]
    assert len(quoted_messages()) > 30
    assert not missing


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
