"""The documentation as a site: it builds without a warning, its links lead somewhere, offline."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("sphinx", reason="comes with the extra docs, on Python 3.11 and newer")

ROOT = Path(__file__).parents[1]
LOADED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}
"""What a browser fetches by itself when it shows a page."""


class Page(HTMLParser):
    """The ids, links and loaded files of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif LOADED.get(tag) in given and given.get("rel") != "canonical":
            self.loaded.append(given[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    folder = tmp_path_factory.mktemp("site")
    flags = ["-q", "-W", "--keep-going", "-b", "html", "-d", str(folder / ".trees")]
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *flags, str(ROOT / "docs"), str(folder)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return {path: Page(path) for path in folder.rglob("*.html")}


def targets(page: Path, links: list[str]) -> Iterator[tuple[str, Path, str]]:
    """Return each link within the site, the file that it leads to, and the anchor in that."""
    for link in links:
        parts = urlsplit(link)
        if not parts.scheme and not parts.netloc:
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            yield link, path, unquote(parts.fragment)


def test_every_page_is_there(site: dict[Path, Page]) -> None:
    built = {path.name for path in site}
    assert {f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md")} <= built


def test_every_link_leads_somewhere(site: dict[Path, Page]) -> None:
    broken = [
        f"{path.name}: {link}"
        for path, page in site.items()
        for link, target, anchor in targets(path, page.links)
        if not target.exists() or (anchor and target in site and anchor not in site[target].ids)
    ]
    assert not broken


def test_it_works_offline(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        found = list(targets(path, page.loaded))
        assert len(found) == len(page.loaded), (path.name, page.loaded)
        assert all(target.exists() for _, target, _ in found), path.name


def test_the_navigation_names_every_page(site: dict[Path, Page]) -> None:
    (index,) = (page for path, page in site.items() if path.name == "index.html")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.stem == "index" or f"{page.stem}.html" in index.links
