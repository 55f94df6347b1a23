"""One HTML page about a run, with everything in it: no script, no link, nothing fetched from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from lightning_megatron.mesh.lazy import figure, save_figure

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c2330 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .25rem .8rem; border-bottom: 1px solid #d8dde6; text-align: left }
td { overflow-wrap: break-word; max-width: 26rem }
pre { background: #f3f5f8; padding: .8rem; overflow-x: auto; font-size: 13px }
.wide { overflow-x: auto; margin-bottom: .6rem }
.wide > svg { max-width: none } .curves svg { max-width: 100%; height: auto }
"""

Curve = Sequence[tuple[float, float]]


def page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """The document.

    Args:
        title: of it.
        sections: headings and HTML; empty ones are left out.
    """
    body = "".join(f"<h2>{escape(heading)}</h2>\n{content}\n" for heading, content in sections if content)
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{view}<title>{escape(title)}</title><style>{_STYLE}</style>'
    whole = f"<head>{head}</head>\n<body><h1>{escape(title)}</h1>\n{body}</body>"
    return f'<!doctype html>\n<html lang="en">{whole}</html>\n'


def text(lines: str) -> str:
    """Text as it is."""
    return f"<pre>{escape(lines)}</pre>" if lines else ""


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table; empty without rows."""
    if not rows:
        return ""

    def line(cells: Sequence[Any], kind: str) -> str:
        return "<tr>" + "".join(f"<{kind}>{_code(escape(str(cell)))}</{kind}>" for cell in cells) + "</tr>"

    return f'<div class="wide"><table>{line(heads, "th")}{"".join(line(row, "td") for row in rows)}</table></div>'


def _code(shown: str) -> str:
    """Names between backticks as code."""
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", shown)


def picture(svg: str, *, curves: bool = False) -> str:
    """An SVG document inside the page."""
    start = svg.find("<svg")
    return f'<div class="{"curves" if curves else "wide"}">{svg[start:]}</div>' if start >= 0 else ""


def draw_curves(losses: Mapping[str, Curve], speed: Curve, unit: str) -> Any:
    """Losses above, throughput below, both over the steps, as a matplotlib figure.

    Args:
        losses: by name, (step, value).
        speed: (step, value).
        unit: of the speed.

    Raises:
        ImportError: matplotlib is not installed.
    """
    drawn = figure(8.0, 5.0)
    above, below = drawn.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for name, points in losses.items():
        marker = "o" if len(points) < 12 else None
        above.plot(*zip(*points, strict=True), label=name, marker=marker, markersize=3, linewidth=1.5)
    above.set_ylabel("loss")
    if losses:
        above.legend(frameon=False)
    if speed:
        below.plot(*zip(*speed, strict=True), color="#2b8a6b", linewidth=1.5)
    below.set_ylabel(unit)
    below.set_ylim(bottom=0)
    below.set_xlabel("optimizer step")
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return drawn


def svg_of(drawn: Any) -> str:
    """A matplotlib figure as an SVG document."""
    return save_figure(drawn, "svg").decode()
