"""What the shell may complete. It waits for each answer, so nothing here imports torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem

LAWS = Path(__file__).parents[2] / "properties" / "laws"
LAW = re.compile(r'\b_?[Ll]aw\(\s*"(\w+)"')
"""Start of a law in its source, which names it without an import."""


def among(names: Iterable[str], incomplete: str) -> list[str]:
    """Return the names that begin with the incomplete word."""
    return [name for name in names if name.startswith(incomplete)]


def implementation_names(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the registered implementations that begin with a word; files where none does."""
    from ...impl.registry import registered

    found = [CompletionItem(name) for name in among(registered(), incomplete)]
    return found or [CompletionItem(incomplete, type="file")]


def law_names(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the laws that begin with the incomplete word."""
    sources = (path.read_text(encoding="utf-8") for path in sorted(LAWS.rglob("*.py")))
    return among((name for source in sources for name in LAW.findall(source)), incomplete)


def feature_values(
    _context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Return the values of a field of ``Feature`` that begin with a word, as rules name them."""
    from ...impl.gating.feature import CHOICES

    return among(CHOICES.get(parameter.name or "", ()), incomplete)


def chip_names(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the chips that begin with the last word of a list, by number and by name."""
    from ...impl.targets.capability import CHIP_NAMES, CHIPS

    before, comma, word = incomplete.rpartition(",")
    names = [*map(str, CHIPS), *(name.replace(" ", "-") for name in CHIP_NAMES), "cpu"]
    found = [name for name in names if name.lower().startswith(word.lower())]
    return [f"{before}{comma}{name}" for name in found]
