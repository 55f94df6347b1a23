"""Pages of the site that are read from the code whenever it is built: arguments of the strategy, and the command line.

MkDocs calls the functions that begin with ``on_`` for every page. Nothing that could fall behind is written into the
repository.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from lightning_megatron.tools.commands.cli import app

STRATEGY = Path(__file__).parents[1] / "lightning_megatron" / "strategy"
GROUPS = {
    "Sizes: how many ranks share what": r"(\w+_parallel_size|layout|layout_options|topology)$",
    "Pipeline: layers over stages": r"(pipeline_|virtual_|variable_shapes|record_timeline)",
    "Micro-batches and the loss": r"(micro_batch|evaluation_micro|whole_batch)",
    "Tensors and tokens: matrices and sequences over ranks": r"(tensor_|sequence_|context_|expert_)",
    "Memory and speed of layers": r"(activation_|compile_|offload)",
    "Replicas: gradients and the optimizer": r"(optimizer_|overlap_|gradient_|weight_|bucket_|nonfinite|log_grad)",
    "Starting and waiting": r"(process_group|timeout|hang_|initial_weights)",
}
OTHERS = "Everything else"


def arguments() -> dict[str, str]:
    """By argument, what the docstring of ``Options`` says about it, as Markdown in one line."""
    tree = ast.parse((STRATEGY / "options" / "options.py").read_text(encoding="utf-8"))
    options = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Options")
    text = (ast.get_docstring(options) or "").partition("Args:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n      +.*)*)", text, re.M)
    plain = {name: " ".join(said.split()).replace("``", "`").replace("|", "\\|") for name, said in found}
    return {name: re.sub(r"`docs/(\w+)\.md`", r"[\1](../\1.md)", said) for name, said in plain.items()}


def signature() -> dict[str, tuple[str, str]]:
    """By argument of ``MegatronStrategy``, its annotation and its default, as they stand in the code."""
    tree = ast.parse((STRATEGY / "strategy.py").read_text(encoding="utf-8"))
    strategy = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "MegatronStrategy")
    made = next(node for node in strategy.body if isinstance(node, ast.FunctionDef) and node.name == "__init__").args
    plain = zip(reversed(made.args), reversed(made.defaults), strict=False)
    keyed = zip(made.kwonlyargs, made.kw_defaults, strict=True)
    pairs = [*reversed(list(plain)), *keyed]
    return {
        entry.arg: (ast.unparse(entry.annotation) if entry.annotation else "", ast.unparse(default) if default else "")
        for entry, default in pairs
    }


def group_of(name: str) -> str:
    """The heading under which an argument stands."""
    return next((title for title, pattern in GROUPS.items() if re.match(pattern, name)), OTHERS)


def arguments_page() -> str:
    """Tables of the strategy's arguments, one for each group; those that Lightning gives itself come last."""
    said, lines = arguments(), []
    for title in [*GROUPS, OTHERS]:
        rows = [(name, default) for name, (_, default) in signature().items() if group_of(name) == title]
        if rows:
            lines += [f"\n## {title}\n", "| argument | default | meaning |", "|---|---|---|"]
            lines += [f"| `{name}` | `{default}` | {said.get(name, 'as Lightning has it')} |" for name, default in rows]
    return "\n".join(lines) + "\n"


def _options(command: Any) -> Iterator[str]:
    for option in command.params:
        names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        if getattr(option, "hidden", False) or option.name in ("help", "install_completion", "show_completion"):
            continue
        named = f"`{option.name.upper()}`" if option.param_type_name == "argument" else names
        default = option.default
        shown = "required" if option.required else "" if default is None or default is False else f"`{default}`"
        said = (option.help or "").replace("|", "\\|")
        yield f"| {named} | {shown} | {said} |"


def _sections(name: str, command: Any) -> Iterator[str]:
    if hasattr(command, "commands"):
        for inner in command.commands:
            yield from _sections(f"{name} {inner}", command.commands[inner])
        return
    table = "\n".join(["| option | default | meaning |", "|---|---|---|", *_options(command)])
    said = "\n".join(line.strip() for line in (command.help or "").splitlines())
    yield f"\n## {name.partition(' ')[2]}\n\n    {name} --help\n\n{said}\n\n{table}\n"


def commands_page() -> str:
    """Every command with its options, as typer knows them."""
    return "\n".join(_sections("lightning-megatron", typer.main.get_command(app)))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put what is read from the code in the places that the pages leave for it."""
    for mark, page in (("<!-- arguments -->", arguments_page), ("<!-- commands -->", commands_page)):
        if mark in markdown:
            markdown = markdown.replace(mark, page())
    return markdown


def on_page_content(html: str, page: Any = None, **_: Any) -> str:
    """Show references between docstrings as the names they end in: ``:class:`~a.b.C``` as ``C``.

    Pages with docstrings or arguments are marked, for the style of their tables.
    """
    html = re.sub(r":(?:class|func|meth|mod|attr|data):<code>~?(?:[\w.]+\.)?(\w+)</code>", r"<code>\1</code>", html)
    if page is not None and (page.file.src_uri.startswith("reference/") or 'class="doc doc-' in html):
        return f'<div class="reference">{html}</div>'
    return html
