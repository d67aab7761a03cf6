"""The documentation keeps up with the code."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest

from kernelproof import impl, reference
from kernelproof.ci.check.pages import PAGES, page_writer
from kernelproof.ci.cli import cli
from kernelproof.impl import gating
from kernelproof.properties.findings.ledger import load_ledger
from kernelproof.properties.laws import LAWS
from kernelproof.reference.problems import ATTENTION_REGIMES
from kernelproof.reference.problems.moe import ASSIGNMENTS, MOE_REGIMES, ROUTE_REGIMES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = Path(__file__).parents[1] / "docs"
PROSE = [DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]


@pytest.mark.parametrize("name", [law.name for law in LAWS])
def test_every_law_is_described(name: str) -> None:
    assert f"`{name}`" in (DOCS / "laws.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name", sorted({*ATTENTION_REGIMES, *MOE_REGIMES, *ROUTE_REGIMES, *ASSIGNMENTS})
)
def test_every_regime_is_described(name: str) -> None:
    assert f"`{name}`" in (DOCS / "laws.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [entry.id for entry in load_ledger().entries])
def test_every_ledger_entry_is_described(name: str) -> None:
    assert f"`{name}`" in (DOCS / "findings.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    stale = f"kernelproof list --markdown docs/{name} writes it again"
    with click.Context(cli):
        page = page_writer(DOCS / name)()
    assert (DOCS / name).read_text(encoding="utf-8") == page, stale


def test_a_page_that_is_not_generated_is_refused() -> None:
    with pytest.raises(click.UsageError, match=r"laws\.md: no page has this name; there are law-b"):
        page_writer(DOCS / "laws.md")


@pytest.mark.parametrize("package", [reference, impl, gating])
def test_every_public_name_is_in_the_reference(package: ModuleType) -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r":: (\w+)$", page, re.MULTILINE)
    assert [name for name in package.__all__ if name not in listed] == []


def rooms() -> list[tuple[str, str]]:
    """Return layer and room of each room that import-linter holds in order."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    return [
        (contract["containers"][0].removeprefix("kernelproof."), room)
        for contract in project["tool"]["importlinter"]["contracts"]
        if contract["id"].startswith("rooms-of-")
        for row in contract["layers"]
        for room in row.split(" | ")
    ]


def test_the_picture_of_the_architecture_shows_every_room_in_its_order() -> None:
    picture = (DOCS / "rooms.svg").read_text(encoding="utf-8")
    shown = re.findall(r"<text[^>]*>([a-z_.]+)</text>", picture)
    layers = dict.fromkeys(layer for layer, _ in rooms())
    assert [name for name in shown if name not in layers] == [room for _, room in rooms()]


@pytest.mark.parametrize("room", [room for layer, room in rooms() if layer != "ci.bump"])
def test_every_room_is_described(room: str) -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| .*`{room}`.* \|", page, re.MULTILINE)


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_no_paragraph_has_more_than_90_words(page: Path) -> None:
    text = re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.) )", text)
    assert [
        part for part in parts if len(part.split()) > 90 and not part.lstrip().startswith("|")
    ] == []
