"""Makes the table of real values, or counts which rows of facts can be stated as problems.

``python -m kernelproof.ci.models --date 2026-11-27 FACTS.tsv CONFIGURATIONS.tsv OUTPUT.tsv``
and ``python -m kernelproof.ci.models --count FACTS.tsv``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .stating import counted
from .table import lines_of, read_rows, table_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser(prog="kernelproof.ci.models", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="inputs; the output comes last")
    parser.add_argument("--date", default="", help="of the comparison that the facts name")
    parser.add_argument("--count", action="store_true", help="count what can be stated instead")
    given = parser.parse_args(arguments)
    if given.count:
        return _count([row for path in given.files for row in read_rows(path)])
    if len(given.files) == 1:
        parser.error("name the inputs, and the output behind them")
    *inputs, output = given.files
    table = table_of([read_rows(path) for path in inputs], given.date)
    output.write_text("\n".join(lines_of(table)) + "\n", encoding="utf-8")
    left = ", ".join(table.without_source)
    print(f"{len(table.rows)} rows of {table.families - len(table.without_source)} families")
    print(f"left out: {len(table.without_source)} families without a source: {left}")
    return 0


def _count(rows: Sequence[dict[str, str]]) -> int:
    found = counted(rows)
    for row, why in found.not_stated:
        print(f"{row['family']} {row['kind']}: {why}")
    print(f"rows of attention that are problems: {found.attention} of {found.of_attention}")
    print(f"rows of experts that are problems: {found.experts} of {found.of_experts}")
    print(f"families all of whose rows are problems: {found.families} of {found.of_families}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
