"""The documentation keeps up with the code; generated pages hold what they are made of."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import click
import pytest

import kernelproof
from kernelproof import impl, reference
from kernelproof.ci.check.pages import PAGES, writer
from kernelproof.ci.cli import cli, main
from kernelproof.ci.support.rows import all_rows
from kernelproof.impl import gating
from kernelproof.properties.findings.ledger import load_ledger
from kernelproof.properties.laws import LAWS
from kernelproof.properties.seeded import BUGS
from kernelproof.reference.operations import OPERATIONS
from kernelproof.reference.problems import ATTENTION_REGIMES
from kernelproof.reference.problems.moe import ASSIGNMENTS, MOE_REGIMES, ROUTE_REGIMES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = Path(__file__).parents[1] / "docs"
PROSE = [
    DOCS.parent / "README.md",
    DOCS.parent / "CONTRIBUTING.md",
    *sorted(page for page in DOCS.glob("*.md") if page.name not in PAGES),
]


@pytest.mark.parametrize(
    "name", sorted({*ATTENTION_REGIMES, *MOE_REGIMES, *ROUTE_REGIMES, *ASSIGNMENTS})
)
def test_every_regime_is_described(name: str) -> None:
    assert f"`{name}`" in (DOCS / "laws.md").read_text(encoding="utf-8")


def rows_of_the_matrix() -> list[str]:
    features = [row.feature for row in all_rows()]
    return list(dict.fromkeys(f"{each.operation}: {each.backend}" for each in features))


HEADINGS: dict[str, tuple[str, list[str]]] = {
    "law-book.md": ("## ", [law.name for law in LAWS]),
    "fields.md": ("## ", list(OPERATIONS)),
    "known-findings.md": ("### ", [entry.id for entry in load_ledger().entries]),
    "support-matrix.md": ("## ", [*rows_of_the_matrix(), "Chips"]),
    "commands.md": (
        "## kernelproof ",
        [name for name, command in cli.commands.items() if not command.hidden],
    ),
}
"""What each generated page has a heading for."""


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_holds_each_thing_once(name: str, tmp_path: Path) -> None:
    assert main(["list", "--markdown", str(tmp_path / name)]) == 0
    page = (tmp_path / name).read_text(encoding="utf-8")
    level, things = HEADINGS[name]
    found = re.findall(rf"^{level}([^ \n]*(?:: .*)?)$", page, re.MULTILINE)
    assert sorted(found) == sorted(things)


def test_the_page_of_fields_has_each_field_of_a_problem() -> None:
    page = str(writer("--markdown", Path("fields.md"))())
    for operation, entry in OPERATIONS.items():
        _, _, rest = page.partition(f"### Problems of {operation}\n")
        table, _, _ = rest.partition("\n### ")
        rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
        assert len(rows) == len(set(rows))
        assert {"seed"} <= set(rows) <= {each.name for each in fields(entry.problem)}


def test_the_law_book_has_each_seeded_bug() -> None:
    page = str(writer("--markdown", Path("law-book.md"))())
    assert [bug.name for bug in BUGS if f"  - `{bug.name}`: " not in page] == []


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_no_page_links_to_one_that_is_not_kept(page: Path) -> None:
    links = re.findall(r"\]\((?:docs/)?([\w.-]+\.md)", page.read_text(encoding="utf-8"))
    assert not set(links) & set(PAGES)


def test_a_page_that_is_not_generated_is_refused() -> None:
    with pytest.raises(click.UsageError, match=r"laws\.md: no page has this name; there are law-b"):
        writer("--markdown", DOCS / "laws.md")


@pytest.mark.parametrize("package", [kernelproof, reference, impl, gating])
def test_every_public_name_is_in_the_reference(package: ModuleType) -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r":: (\w+)$", page, re.MULTILINE)
    assert [name for name in package.__all__ if name not in (*listed, "__version__")] == []


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
