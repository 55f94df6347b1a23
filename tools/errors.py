"""Every message that the package raises, read from its source; ``python -m tools.errors`` writes them to the docs.

The upper half of ``docs/errors.md`` is written by hand, for messages that need more than they say. The lower half is
this list: a message, and what it says itself about the way out, so that whoever searches the docs for an error finds
it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "lightning_megatron"
PAGE = REPOSITORY / "docs" / "errors.md"
START, END = "<!-- messages: written by `python -m tools.errors` -->\n", "<!-- end of messages -->\n"
HIDDEN = "…"
NO_MESSAGE = ("AttributeError", "KeyError", "IndexError", "StopIteration", "NotImplementedError", "AssertionError")
"""Errors of Python's own protocols, which code of this package answers and nobody reads."""

ROOMS = {
    "strategy": "The strategy and its Trainer",
    "parallelize": "Tensor-parallel plans",
    "layers": "Drop-in layers",
    "context_parallel": "Long context",
    "experts": "Experts",
    "pipeline": "Pipelines and schedules",
    "data_parallel": "Gradients and optimizers",
    "checkpoints": "Checkpoints",
    "mesh": "Ranks and messages",
    "models": "The reference decoder",
    "planner": "The planner",
    "tools": "The command line and rehearsals",
}


def text_of(node: ast.AST, scope: ast.AST | None, module: ast.Module, depth: int = 0) -> list[str]:
    """The texts that an expression may have, with ``…`` for values; empty if it holds none that can be read.

    Args:
        node: the expression.
        scope: the function that it stands in; assignments there are followed.
        module: functions and constants of it are followed, and functions that it imports.
        depth: of following.
    """
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        texts = [""]
        for part in node.values:
            found = _filled_in(part, scope, module, depth + 1, opens=texts == [""])
            texts = [text + more for text in texts for more in found]
        return texts
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mod)):
        left, right = (text_of(side, scope, module, depth + 1) for side in (node.left, node.right))
        joined = [a + b for a in left or [HIDDEN] for b in right or [HIDDEN]]
        return (left or []) if isinstance(node.op, ast.Mod) else joined if left or right else []
    if isinstance(node, ast.IfExp):
        return [*text_of(node.body, scope, module, depth + 1), *text_of(node.orelse, scope, module, depth + 1)]
    if depth > 6:
        return []
    if isinstance(node, ast.Name):
        values = _assigned(scope or module).get(node.id, ())
        return [text for value in values for text in text_of(value, scope, module, depth + 1)]
    if isinstance(node, ast.Call):
        return _returned(node, module, depth)
    return []


@functools.cache
def _assigned(scope: ast.AST) -> dict[str, list[ast.expr]]:
    """Name -> what is assigned to it, in order."""
    found: dict[str, list[ast.expr]] = {}
    for statement in ast.walk(scope):
        if not isinstance(statement, ast.Assign):
            continue
        for target in statement.targets:
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(statement.value)
    return found


def _filled_in(part: ast.AST, scope: ast.AST | None, module: ast.Module, depth: int, *, opens: bool) -> list[str]:
    """The texts of a part of an f-string: ``…`` for a value; but that of a constant, and sentences at the start."""
    if isinstance(part, ast.Constant):
        return [str(part.value)]
    value = part.value if isinstance(part, ast.FormattedValue) else None
    if not isinstance(value, ast.Name):
        return [HIDDEN]
    if value.id.isupper():
        return [text for text in text_of(value, module, module, depth)[:1] if text] or [HIDDEN]
    if isinstance(scope, ast.FunctionDef):
        given = scope.args.args[len(scope.args.args) - len(scope.args.defaults) :]
        for argument, default in zip(given, scope.args.defaults, strict=True):
            if argument.arg == value.id and isinstance(default, ast.Constant) and default.value:
                return [str(default.value)] if isinstance(default.value, str) else [HIDDEN]
    sentences = [text for text in text_of(value, scope, module, depth) if text.count(" ") > 8] if opens else []
    return sentences or [HIDDEN]


def _returned(call: ast.Call, module: ast.Module, depth: int) -> list[str]:
    """What a function of the package, or an exception that one makes, may say."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "join" and call.args and isinstance(call.args[0], ast.GeneratorExp):
        return text_of(call.args[0].elt, None, module, depth + 1)
    if name in ("format", "join", "strip"):
        return text_of(call.func.value, None, module, depth + 1) if isinstance(call.func, ast.Attribute) else []
    if name.endswith(("Error", "Exception")):
        return [text for argument in call.args[:1] for text in text_of(argument, None, module, depth + 1)]
    found = []
    for function, home in _named(name, module):
        for statement in ast.walk(function):
            if isinstance(statement, ast.Return) and statement.value is not None:
                found += text_of(statement.value, function, home, depth + 1)
    return found


def _named(name: str, module: ast.Module) -> list[tuple[ast.FunctionDef, ast.Module]]:
    """Functions of that name, with the module that each stands in: this one, or one that it is imported from."""
    nodes = _nodes(module)
    here = [(node, module) for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name]
    if here:
        return here
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            path = REPOSITORY.joinpath(*(node.module or "").split(".")).with_suffix(".py")
            return _named(name, _parsed(path)) if path.is_file() else []
    return []


@functools.cache
def _nodes(module: ast.Module) -> list[ast.AST]:
    """Those of functions and imports."""
    return [node for node in ast.walk(module) if isinstance(node, (ast.FunctionDef, ast.ImportFrom))]


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def raised(path: Path) -> Iterator[str]:
    """Messages of every ``raise`` with a text of its own in a file."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    scopes = {
        id(child): function
        for function in ast.walk(module)
        if isinstance(function, ast.FunctionDef)
        for child in ast.walk(function)
    }
    for node in ast.walk(module):
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
            continue
        kind = node.exc.func.attr if isinstance(node.exc.func, ast.Attribute) else getattr(node.exc.func, "id", "")
        if kind in NO_MESSAGE:
            continue
        arguments = node.exc.args[:1] if kind[:1].isupper() or kind.startswith("_") else []
        arguments += [] if kind[:1].isupper() else [node.exc]
        for argument in arguments:
            for text in text_of(argument, scopes.get(id(node)), module):
                whole = " ".join(text.split())
                if sum(character.isalpha() for character in whole.replace(HIDDEN, "")) > 8:
                    yield whole


def split(message: str) -> tuple[str, str]:
    """A message's complaint, and what it says to do; the second is empty where it says no more."""
    message = re.sub(rf"\. ?{HIDDEN}$", "", message)
    cuts = [
        (before, after.rstrip("."))
        for before, found, after in map(message.partition, ("; ", ". ", ": "))
        if found and len(after) > 12 and len(before) > 20
        if before.count("`") % 2 == 0 and before.count("{") == before.count("}")
    ]
    of_sentences = [(before, after) for before, after in cuts if not after.startswith("or use ")]
    return next(iter(of_sentences or cuts), (message.rstrip("."), ""))


@functools.cache
def messages() -> dict[str, list[str]]:
    """Every message, by room, each once."""
    found: dict[str, list[str]] = {}
    for room in ROOMS:
        texts = [text for path in sorted((PACKAGE / room).rglob("*.py")) for text in raised(path)]
        found[room] = sorted(dict.fromkeys(texts), key=lambda text: text.strip("`… ").lower())
    return found


def cell(text: str) -> str:
    """As Markdown in a table."""
    for character in ("|", "<", "*", "_"):
        text = text.replace(character, "\\" + character) if "`" not in text or character == "|" else text
    return text


def row(message: str) -> str:
    """A message's line in the table."""
    complaint, remedy = split(message)
    return f"| {cell(complaint)} | {cell(remedy) or 'as it says'} |"


def table() -> str:
    """All messages, room by room."""
    lines = []
    for room, texts in messages().items():
        lines += [f"### {ROOMS[room]}", "", "| message | and what it says to do |", "|---|---|"]
        lines += map(row, texts)
        lines.append("")
    return "\n".join(lines)


def page_with_table(page: str) -> str:
    """The page with today's list between its two marks."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return before + START + "\n" + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
