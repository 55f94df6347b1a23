"""Opens the built site, and reports of runs, in a real browser, and says what a reader would stumble over.

    pip install playwright     # and Chromium, from the system's packages
    mkdocs build --strict -d site
    python -m tools.browser site --report runs/pretrain_gpt/report.html --shots shots

Every page is opened on a desktop and at the width of a phone. Looked for: errors of scripts, requests that fail or
leave the site, links and anchors that lead nowhere, pictures that do not show, pages and tables wider than a phone, a
search without results, a copy button that copies something else. Screenshots of all pages are written, to be looked at.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1300, "height": 900}
PATIENCE = 300_000  # ms: one page lists all messages, and is long
TOO_WIDE = """() => {
  const width = document.documentElement.clientWidth, found = [];
  const own = (node) => /auto|scroll/.test(getComputedStyle(node).overflowX);
  const scrolls = (node) => node && (own(node) || scrolls(node.parentElement));
  if (document.documentElement.scrollWidth > width + 1) found.push("the page");
  for (const table of document.querySelectorAll("table")) {
    if (table.getBoundingClientRect().width > width && !scrolls(table.parentElement)) found.push("a table");
    const narrow = (cell) => cell.innerText.length > 40 && cell.getBoundingClientRect().width < 60;
    if ([...table.querySelectorAll("td")].some(narrow)) found.push("a table with narrow columns");
  }
  return found;
}"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder on this machine, while the block runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()


def check_site(browser: Any, site: Path, shots: Path) -> list[str]:
    """Faults of a site, one line each."""
    faults: list[str] = []
    with served(site) as base:
        context = browser.new_context(viewport=DESKTOP, permissions=["clipboard-read", "clipboard-write"])
        page, phone = context.new_page(), browser.new_context(viewport=PHONE, is_mobile=True).new_page()
        for each in (page, phone):
            each.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: faults.append(f"script: {error}"))
        page.on("response", lambda got: faults.append(f"{got.status}: {got.url}") if got.status >= 400 else None)
        page.on("request", lambda sent: faults.append(f"leaves: {sent.url}") if _leaves(sent.url, base) else None)
        page.goto(base)
        links = page.eval_on_selector_all(".md-nav--primary a.md-nav__link", "all => all.map(one => one.href)")
        addresses = list(dict.fromkeys(link.split("#")[0] for link in links))
        faults += [] if len(addresses) > 25 else [f"the menu has {len(addresses)} pages"]
        faults += _interaction_faults(page, base)
        anchors, targets = {}, []
        for address in addresses:
            name = address[len(base) :].strip("/").replace("/", "_") or "start"
            page.goto(address)
            anchors[address] = set(page.eval_on_selector_all("[id]", "all => all.map(one => one.id)"))
            found = page.eval_on_selector_all("article a[href]", "all => all.map(one => one.href)")
            targets += [(name, target) for target in found if target.startswith(base)]
            empty = page.eval_on_selector_all("article img", "all => all.filter(one => !one.naturalWidth).length")
            faults += [f"{name}: {empty} pictures do not show"] if empty else []
            page.screenshot(path=shots / f"{name}.png", full_page=True)
            phone.goto(address)
            faults += [f"{name}: {what} is too wide for a phone" for what in phone.evaluate(TOO_WIDE)]
            phone.screenshot(path=shots / f"{name}-phone.png")
        for name, target in targets:
            at, _, anchor = target.partition("#")
            there = at in anchors or (site / at[len(base) :]).exists()
            if not there or (anchor and at in anchors and unquote(anchor) not in anchors[at]):
                faults.append(f"{name}: a link to {target[len(base) :]}, which is not there")
    return faults


def _leaves(address: str, base: str) -> bool:
    return not address.startswith((base, "data:", "blob:"))


def _interaction_faults(page: Any, base: str) -> list[str]:
    """Whether the menu, the search and the copy button do what they are for."""
    faults = []
    page.click('.md-nav--primary >> text="Launching"')
    page.wait_for_url("**/launching/")
    page.goto(base)
    page.fill(".md-search__input", "weight_sharding")
    page.wait_for_selector(".md-search-result__item a")
    page.goto(base)
    code = page.inner_text("article pre >> nth=0")
    page.hover("article pre >> nth=0")
    page.click("article :is(button.md-code__button, .md-clipboard) >> nth=0")
    page.wait_for_timeout(500)
    copied = page.evaluate("navigator.clipboard.readText()")
    if copied.split() != code.split():
        faults.append(f"the copy button copies {copied[:60]!r}")
    return faults


def check_report(browser: Any, report: Path, shots: Path) -> list[str]:
    """Faults of a report of a run, which is one file that fetches nothing."""
    faults: list[str] = []
    page = browser.new_context(viewport=PHONE).new_page()
    page.on("pageerror", lambda error: faults.append(f"{report}: {error}"))
    page.on("request", lambda sent: faults.append(f"{report} fetches {sent.url}") if _fetched(sent.url) else None)
    page.goto(report.absolute().as_uri())
    faults += [f"{report}: {what} is too wide for a phone" for what in page.evaluate(TOO_WIDE)]
    faults += [] if page.query_selector_all("svg") else [f"{report}: no picture"]
    page.set_viewport_size(DESKTOP)
    page.screenshot(path=shots / "report.png", full_page=True)
    return faults


def _fetched(address: str) -> bool:
    return not address.startswith(("file:", "data:"))


def main() -> int:
    """Check what the command line names; 1 if there are faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="the folder that mkdocs has built")
    parser.add_argument("--report", type=Path, action="append", default=[], help="a report.html of a run")
    parser.add_argument("--shots", type=Path, default=Path("shots"), help="where pictures are written [shots]")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    options.shots.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as play:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        faults = check_site(browser, options.site, options.shots)
        for report in options.report:
            faults += check_report(browser, report, options.shots)
        browser.close()
    print(*(faults or ["no faults"]), sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
