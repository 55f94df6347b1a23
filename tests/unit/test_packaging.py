"""What is shipped is what is said: one version, classifiers that were tested, and private names that still exist."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import tomllib
from functools import reduce
from pathlib import Path

import lightning
import pytest
import torch
import torchmetrics
import yaml

import lightning_megatron

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_megatron"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_version_stands_in_one_place_and_the_changelog_leads_up_to_it() -> None:
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    sections = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert sections[0] in ("Unreleased", lightning_megatron.__version__)


def test_classifiers_name_the_python_that_the_pinned_versions_were_run_with() -> None:
    tested = re.search(r"Python (3\.\d+), Linux", (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert tested is not None
    named = [text.rsplit(" ", 1)[1] for text in PROJECT["classifiers"] if re.search(r"Python :: 3\.", text)]
    assert named == [tested[1]] and PROJECT["requires-python"] == f">={tested[1]}"


def test_the_source_distribution_lists_what_the_repository_has() -> None:
    lines = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()
    included = [name for line in lines if line.startswith(("include ", "graft ")) for name in line.split()[1:]]
    assert {"CHANGELOG.md", "docs", "examples", "tests"} <= set(included)
    assert not [name for name in included if not (ROOT / name).exists()]


def test_the_citation_is_read_and_agrees() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["title"], citation["license"]) == (PROJECT["name"], PROJECT["license"])
    assert citation["references"][0]["url"] in (ROOT / "README.md").read_text(encoding="utf-8")


def _package_page(source: str | None) -> str:
    page = runpy.run_path(str(ROOT / "setup.py"))["package_page"]
    return str(page((ROOT / "README.md").read_text(encoding="utf-8"), source, "1.2.3"))


def _targets(markdown: str) -> list[str]:
    return re.findall(r"\]\(([^)]*)\)", markdown)


def test_links_of_the_package_page_are_absolute() -> None:
    page = _package_page("https://example.org/code/")
    targets = _targets(page)
    assert len(targets) == len(_targets((ROOT / "README.md").read_text(encoding="utf-8"))) > 40
    assert all(target.startswith("https://") for target in targets)
    ours = [target.partition("/blob/v1.2.3/")[2] for target in targets if target.startswith("https://example.org")]
    assert len(ours) > 40 and all((ROOT / re.split(r"[?#]", name)[0]).exists() for name in ours)
    assert "](https://example.org/code/blob/v1.2.3/docs/images/schedule_1f1b.svg?raw=true)" in page


def test_links_of_a_package_page_without_a_repository_are_dropped_not_dead() -> None:
    page = _package_page(None)
    assert all(target.startswith("https://") for target in _targets(page))
    assert "![" not in page and "predicted, and measured on CPU" in page.replace("\n", " ")


def private_names_of_torch() -> set[str]:
    """Dotted names below torch that the package writes and that have a part with an underscore before it."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
                found.add(ast.unparse(node))
    return {name for name in found if re.fullmatch(r"[\w.]+", name) and re.search(r"\._[a-z]", name, re.I)}


def _found(name: str) -> object:
    """The object of a dotted name, whose first parts are modules.

    Raises:
        AttributeError: there is none.
    """
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        return reduce(getattr, parts[length:], module)
    raise AttributeError(name)


def test_private_names_of_torch_are_where_the_package_looks_for_them() -> None:
    names = private_names_of_torch()
    assert len(names) > 10 and "torch._C.DisableTorchFunctionSubclass" in names
    moved = []
    for name in sorted(names):
        try:
            _found(name)
        except AttributeError:
            moved.append(name)
    assert not moved, f"torch {torch.__version__} has moved these"
    with pytest.raises(AttributeError):
        _found("torch._subclasses.fake_tensor.NoSuchTensor")


def test_private_names_of_lightning_are_in_its_source() -> None:
    own = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(
            r"(?:self|cls)\.(_\w+)|(?:def|class) (_\w+)|^ *(_\w+)\b *[:=]", path.read_text(encoding="utf-8"), re.M
        )
        for name in name
    }
    used = {
        node.attr
        for path in (PACKAGE / "strategy" / "lightning").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr) and ast.unparse(node) != "os._exit"
    }
    torch_home = Path(torch.__file__).parent
    folders = (
        *(Path(peer.__file__).parent for peer in (lightning, torchmetrics)),
        *(torch_home / "optim", torch_home / "utils"),
    )
    sources = [path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py")]
    there = {word for text in sources for word in re.findall(r"\b_[a-z]\w*", text)}
    assert len(used - own) > 10
    assert not used - own - there, f"Lightning {lightning.__version__} has moved these"
