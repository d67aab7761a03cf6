"""The documentation keeps up with the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelproof.ci.check.law_book import law_book
from kernelproof.properties.findings.ledger import load_ledger
from kernelproof.properties.laws import LAWS
from kernelproof.reference.problems.moe import ASSIGNMENTS, MOE_REGIMES, ROUTE_REGIMES
from kernelproof.reference.problems.others import ATTENTION_REGIMES

DOCS = Path(__file__).parents[1] / "docs"


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


def test_the_law_book_is_up_to_date() -> None:
    stale = "kernelproof list --markdown docs/law-book.md writes it again"
    assert (DOCS / "law-book.md").read_text(encoding="utf-8") == law_book(), stale
