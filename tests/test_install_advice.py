"""What is advised to install can be installed: Kernelproof is on no package index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("reference", "impl", "properties", "fixtures", "ci", "docs", "__main__.py", "README.md",
           "CONTRIBUTING.md")  # fmt: skip
KINDS = {".py", ".md", ".yml", ".yaml", ".sh", ".jinja", ".toml", ".template", ".js", ""}
ADVICE = re.compile(r"install\s+[\"'`]*kernelproof\b(?!\[[\w,]+\] @| @)")


def files() -> list[Path]:
    found = [ROOT / name for name in FOLDERS]
    for folder in [each for each in found if each.is_dir()]:
        found += [each for each in folder.rglob("*") if each.suffix in KINDS]
    evidence = ROOT / "fixtures" / "evidence"
    return [each for each in found if each.is_file() and evidence not in each.parents]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("pip install 'kernelproof[suite]'", True),
        ("pip install kernelproof", True),
        ('pip install "kernelproof[suite] @ $KERNELPROOF"', False),
        ("pip install '.[suite]' in a clone of kernelproof", False),
    ],
)
def test_what_counts_as_advice(text: str, wrong: bool) -> None:
    assert bool(ADVICE.search(text)) == wrong


def test_nothing_is_advised_that_no_index_has() -> None:
    wrong = []
    for path in files():
        text = path.read_text(encoding="utf-8", errors="replace")
        wrong += [f"{path.relative_to(ROOT)}: {each[0]}" for each in ADVICE.finditer(text)]
    assert not wrong
