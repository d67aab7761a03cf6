"""Adds runs to ``fixtures/evidence``: of each only what the support rules and the pages read.

    python -m kernelproof.ci.evidence RUN.json...

A file of ``--json`` or ``--evidence`` becomes, by its kind:

- ``score``: a line a bug in ``score-OPERATION.json``: the laws that killed it, the seconds, the
  comparisons that rejected it;
- ``check --gating``: a line a cell in ``gating-smSM-RELEASE.json``: the question and its outcome;
- ``support --compile``: a line a unit in ``compile-DATE.json``;
- ``check``, ``gate`` and ``bump``: in ``caught.json``, the laws that found each ledger entry.

What is added replaces what was kept of the same unit, and of the same bug or cell if that is not
newer: the newest measurement wins, whatever it says. The others stay as they are.

Exit code 2: a file cannot be read, or holds no run that can be kept; files before it are kept.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ...impl.gating.knowledge import EvidenceError
from ...properties.findings.files import OutputError
from .adding import RunError, add


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    paths = [Path(each) for each in (sys.argv[1:] if arguments is None else arguments)]
    if not paths:
        print("Usage: python -m kernelproof.ci.evidence RUN.json...", file=sys.stderr)
        return 2
    try:
        for path in paths:
            for name, said in add(path).items():
                for each in said:
                    print(f"{path}: {name}: {each}")
    except (RunError, EvidenceError, OutputError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
