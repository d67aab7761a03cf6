"""Adds runs to ``fixtures/evidence``: of each only what the support rules and the pages read.

    python -m kernelproof.ci.evidence RUN.json...

A file of ``--json`` or ``--evidence`` becomes, by its kind:

- ``score``: a line a bug in ``score-OPERATION.json``: the laws that killed it, the seconds, the
  comparisons that rejected it;
- ``check --gating``: a line a cell in ``gating-smSM-RELEASE.json``: the question and its outcome;
- ``support --compile``: a line a unit in ``compile-DATE.json``;
- ``check``, ``gate`` and ``bump``: in ``caught.json``, the laws that found each ledger entry.

What is added replaces what was kept of the same bug or cell and leaves the others as they are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..fixtures import CAUGHT, EVIDENCE
from ..impl import Target
from ..impl.gating.knowledge import FORMAT as COMPILED
from ..impl.gating.knowledge import MACHINE
from ..impl.gating.knowledge import SCHEMA as GATING
from ..impl.gating.rules import NOT_RUN
from ..impl.targets.data_files import read_json
from ..properties.findings.ledger import Entry, load_ledger
from ..properties.verdicts.verdict import Verdict
from ..reference import problem_from_json
from .bump.report.contents import SCHEMA as BUMP
from .reports.json_report import SCHEMA as REPORT

TILE = "tile"
"""The control of faults in Triton kernels, which are scored where Triton is and not kept."""
OF_BUGS = ("name", "control", "killed", "judged", "seconds", "laws")
OF_CELLS = ("implementation", "cell", "feature", "side", "rules", "outcome", "entry")


class RunError(ValueError):
    """A file that holds no run that can be kept."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    paths = [Path(each) for each in (sys.argv[1:] if arguments is None else arguments)]
    try:
        for path in paths:
            for name in add(path):
                print(f"{path}: kept in {name}")
    except RunError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


def add(path: Path, folder: Path = EVIDENCE) -> list[str]:
    """Add a run to the folder, and return the names of the files that keep it.

    Raises:
        RunError: the file cannot be read, or holds no run that can be kept.
    """
    run = read_json(path, RunError)
    schema = run.get("schema", run.get("format")) if isinstance(run, dict) else None
    if schema in (REPORT, BUMP):
        kept = {CAUGHT.name: _with_caught(_read(folder / CAUGHT.name), caught_by(run))}
        if "gating" in run:
            kept |= _with_cells(run["gating"], folder)
    elif schema == GATING:
        kept = _with_cells(run, folder)
    elif schema == COMPILED:
        kept = {f"compile-{run['date']}.json": _lines(run, "records")}
    elif isinstance(run, dict) and {"bugs", "comparison", "profile"} <= run.keys():
        kept = _with_bugs(run, folder)
    else:
        message = f"{path}: no run of score, check, gate, bump or support --compile"
        raise RunError(message)
    for name, text in kept.items():
        (folder / name).write_text(text, encoding="utf-8")
    return sorted(kept)


def _with_bugs(run: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Return the kept scores of the operations of a run, with its bugs in their places.

    Raises:
        RunError: the run was interrupted, or is of another profile than what is kept.
    """
    if "interrupted" in run["shortfalls"]:
        message = "a score that was interrupted cannot be kept: a bug may have lacked time"
        raise RunError(message)
    comparison = run["comparison"] or {"compared": [], "yardsticks": {}}
    rejected = {
        name: {*each["caught"], *each["accused"]} for name, each in comparison["yardsticks"].items()
    }
    scored = [each for each in run["bugs"] if each["control"] != TILE]
    files = {}
    for operation in dict.fromkeys(each["operation"] for each in scored):
        name = f"score-{operation}.json"
        known = _read(folder / name) or {"operation": operation, "profile": run["profile"]}
        if run["profile"] != known["profile"]:
            message = f"{name} is of profile {known['profile']}, and the run is of {run['profile']}"
            raise RunError(message)
        # Positions, since the names of the comparisons would be most of the file.
        comparisons = list(dict.fromkeys([*known.get("comparisons", ()), *rejected]))
        bugs = {each["name"]: each for each in known.get("bugs", ())}
        for each in (one for one in scored if one["operation"] == operation):
            row = {key: each[key] for key in OF_BUGS}
            row["seconds"] = None if each["seconds"] is None else round(each["seconds"], 1)
            if each["name"] in comparison["compared"]:
                row["rejected_by"] = [
                    number
                    for number, by in enumerate(comparisons)
                    if each["name"] in rejected.get(by, ())
                ]
            bugs[each["name"]] = row
        rows = sorted(bugs.values(), key=lambda row: row["name"])
        files[name] = _lines({**known, "comparisons": comparisons, "bugs": rows}, "bugs")
    return files


def _with_cells(run: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Return the kept cells of a run's chip and release, with what the run tried last."""
    target = {name: run["target"][name] for name in MACHINE}
    name = f"gating-sm{target['sm']}-{target['flashinfer']}.json"
    known = _read(folder / name) or {"trials": [], "date": ""}
    tried = [
        {key: each[key] for key in OF_CELLS} for each in run["trials"] if each["outcome"] != NOT_RUN
    ]
    before, later = known["trials"], tried
    if run["date"] < known["date"]:
        before, later = later, before
    asked = set(map(_question, later))
    cells = [*(each for each in before if _question(each) not in asked), *later]
    date = max(run["date"], known["date"])
    data = {"schema": GATING, "target": target, "date": date}
    return {name: _lines({**data, "trials": sorted(cells, key=_question)}, "trials")}


def _question(cell: Mapping[str, Any]) -> str:
    return json.dumps([cell["implementation"], cell["feature"]], sort_keys=True)


def caught_by(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the ledger entries that explain a finding of a run, with each law of that finding."""
    entries = load_ledger().entries
    if run["schema"] == BUMP:
        known = {entry.id for entry in entries}
        for found in run["findings"]:
            if found["entry"] in known:
                yield from ((found["entry"], law) for law in found["laws"])
    else:
        names = ("device", "sm", "flashinfer", "triton", "torch")
        target = Target(**{name: run["target"].get(name) for name in names})
        for found in run["findings"]:
            yield from ((each.id, found["law"]) for each in entries if _is(each, found, target))


def _is(entry: Entry, found: Mapping[str, Any], target: Target) -> bool:
    """Whether a finding of a run is an entry's; runs before the entry call it a failure."""
    status = entry.status if found["status"] == "KNOWN" else found["status"]
    if not entry.covers(found["implementation"], target):
        return False
    if not found["problem"]:  # kept evidence names no problem that hangs or crashes
        alike = status == entry.status and (not entry.kinds or found["kind"] in entry.kinds)
        return alike and entry.of_law(found["law"])
    verdict = Verdict.from_json({"status": status, "kind": found["kind"]})
    return entry.explains(found["law"], verdict, problem_from_json(found["problem"]))


def _with_caught(known: Mapping[str, Sequence[str]], found: Iterable[tuple[str, str]]) -> str:
    laws = {entry: set(names) for entry, names in known.items()}
    for entry, law in found:
        laws.setdefault(entry, set()).add(law)
    rows = ",\n".join(
        f" {json.dumps(entry)}: {json.dumps(sorted(laws[entry]))}" for entry in sorted(laws)
    )
    return f"{{\n{rows}\n}}\n"


def _lines(data: Mapping[str, Any], rows: str) -> str:
    """Return JSON with a line for each field, and for each row of one of them."""
    fields = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in data.items() if k != rows]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in data[rows])
    return "{\n" + ",\n".join([*fields, f" {json.dumps(rows)}: [\n{lines}\n ]"]) + "\n}\n"


def _read(path: Path) -> dict[str, Any]:
    return dict(read_json(path, RunError)) if path.exists() else {}


if __name__ == "__main__":
    sys.exit(main())
