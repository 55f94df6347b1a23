"""Makes the package's page on an index from README.md; everything else about the build stands in pyproject.toml.

An index shows the text without the repository around it, where relative links lead nowhere.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[((?:[^\[\]`]|`[^`]*`)*)\]\(([^()\s]+)\)")


def package_page(readme: str, source: str | None, version: str) -> str:
    """README.md with links that lead somewhere from any place.

    Args:
        readme: Markdown with links relative to the root of the repository.
        source: Address of the repository, `[project.urls] Source`. As long as there is none, the names of files stay
            without a link, and pictures are left out.
        version: of the package, whose tag the links lead to.
    """

    def absolute(found: re.Match[str]) -> str:
        picture, text, target = found.groups()
        if target.startswith("https://"):
            return found[0]
        if source is None:
            return "" if picture else text
        address = f"{source.rstrip('/')}/blob/v{version}/{target}"
        return f"![{text}]({address}?raw=true)" if picture else f"[{text}]({address})"

    return LINK.sub(absolute, readme)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    code = (ROOT / project["name"] / "__init__.py").read_text(encoding="utf-8")
    number = re.search(r'^__version__ = "(.+)"', code, re.M)
    assert number is not None
    page = package_page((ROOT / "README.md").read_text(encoding="utf-8"), project["urls"].get("Source"), number[1])
    setup(long_description=page, long_description_content_type="text/markdown")
