"""The rooms of the package as a table, read from the tree; ``python -m tools.house`` writes it into the docs."""

from __future__ import annotations

import ast
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "lightning_megatron"
PAGE = REPOSITORY / "docs" / "how_it_works.md"
START, END = "<!-- rooms: written by `python -m tools.house` -->\n", "<!-- end of rooms -->\n"

FLOORS = {
    "mesh": 1,
    "layers": 2,
    "models": 3,
    "checkpoints": 3,
    "context_parallel": 3,
    "experts": 4,
    "parallelize": 3,
    "pipeline": 3,
    "planner": 4,
    "data_parallel": 4,
    "strategy": 5,
    "callbacks": 6,
    "__init__": 6,
    "tools": 6,
    "__main__": 7,
}
"""Floor of every room; imports point to lower floors only, the planner's to `mesh.layout` and `pipeline.schedules`."""


def sentence(folder: Path) -> str:
    """First line of the docstring of a folder, as Markdown."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`").rstrip(".").replace("|", "\\|")


def table() -> str:
    """Rooms from the top floor down, and what is in each."""
    lines = ["| floor | room | what lives there |", "|---|---|---|"]
    for name, floor in sorted(FLOORS.items(), key=lambda item: (-item[1], item[0])):
        if name == "__main__":
            lines.append(f"| {floor} | `__main__.py` | `python -m lightning_megatron` |")
            continue
        if name == "__init__":
            lines.append(f"| {floor} | `__init__.py` | {sentence(PACKAGE)}: the public index |")
            continue
        lines.append(f"| {floor} | **`{name}/`** | {sentence(PACKAGE / name)} |")
        inside = sorted(path.parent for path in (PACKAGE / name).glob("*/__init__.py"))
        lines += [f"| | `{name}/{path.name}/` | {sentence(path)} |" for path in inside]
    return "\n".join(lines) + "\n"


def page_with_table(page: str) -> str:
    """The page with today's table between its two marks."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return before + START + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text()))
