"""Adding a run to a folder of what is kept, by its kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ...fixtures import CAUGHT, EVIDENCE
from ...impl import Target
from ...impl.gating import Feature
from ...impl.gating.knowledge import FORMAT as COMPILED
from ...impl.gating.knowledge import SCHEMA as GATING
from ...impl.gating.knowledge import read_compilation
from ...impl.gating.rules import NOT_RUN
from ...impl.gating.rules import SELECTED as LEVEL
from ...impl.gating.schema import GatingEvidence, TrialTable
from ...impl.gating.selections import ATTENTION, packed, part_of
from ...impl.targets.data_files import read_json
from ...impl.targets.schemas import converted
from ...properties.findings.files import Output
from ...properties.findings.ledger import Entry, load_ledger
from ...properties.verdicts.verdict import Verdict
from ...reference import problem_from_json
from ..bump.report.contents import SCHEMA as BUMP
from ..reports.shape import SCHEMA as REPORT
from ..support.selected import SCHEMA as SELECTED
from .shapes import Bug, Bump, Comparison, Finding, KeptBug, KeptScore, Report, Score

T = TypeVar("T")
Added = dict[str, tuple[str, list[str]]]
"""The text of each file that keeps a run, by its name, and what is said of it."""
KEPT, OLDER = "kept", "older than what is kept"
TILE = "tile"
"""The control of faults in Triton kernels, which are scored where Triton is and not kept."""


class RunError(ValueError):
    """A file that holds no run that can be kept."""


def add(path: Path, folder: Path = EVIDENCE) -> dict[str, list[str]]:
    """Add a run to the folder.

    Returns:
        The names of the files that keep it, each with what is said of it: of bugs and cells, which
        are older than what is kept.

    Raises:
        RunError, EvidenceError: the file, or a file that keeps such runs, cannot be read, or the
            file holds no run that can be kept.
        OutputError: a file cannot be written.
    """
    run = read_json(path, RunError)
    schema = run.get("schema", run.get("format")) if isinstance(run, dict) else None
    readers: dict[Any, Callable[[], Added]] = {
        GATING: lambda: _with_cells(path, run, folder),
        COMPILED: lambda: _with_units(path, folder),
        SELECTED: lambda: _with_selections(path, run),
    }
    if schema in (REPORT, BUMP):
        kept = _with_caught(path, run, folder)
        if "gating" in run:
            kept |= _with_cells(path, run["gating"], folder)
    elif schema in readers:
        kept = readers[schema]()
    elif isinstance(run, dict) and {"bugs", "comparison", "profile"} <= run.keys():
        kept = _with_bugs(path, run, folder)
    else:
        message = f"{path}: no run of score, check, gate, bump, support --compile or --binaries"
        raise RunError(message)
    if not kept:
        message = f"{path}: none of its cells was run"
        raise RunError(message)
    for name in kept:
        if Path(name).name != name:
            message = f"{path}: {name} is no name of a file"
            raise RunError(message)
    for name, (text, _) in kept.items():
        Output("", folder / name).write(text)
    return {name: said for name, (_, said) in sorted(kept.items())}


def _with_bugs(path: Path, data: object, folder: Path) -> Added:
    """Return the kept scores of the operations of a run, with its bugs in their places.

    Of two rows of a bug the newest measurement is kept, also where the bug survived only in it.

    Raises:
        RunError: the run cannot be kept, see ``_unfit``, or is of another profile than what is.
    """
    run = converted(data, Score, path, RunError)
    scored = [each for each in run.bugs if each.control != TILE]
    if unfit := _unfit(run, scored):
        message = f"{path}: {unfit}"
        raise RunError(message)
    files: Added = {}
    for operation in dict.fromkeys(each.operation for each in scored):
        name = f"score-{operation}.json"
        known = _read(folder / name, KeptScore, KeptScore(operation, run.profile))
        if run.profile != known.profile:
            message = f"{name} is of profile {known.profile}, and the run is of {run.profile}"
            raise RunError(message)
        comparison = run.comparison or Comparison()
        # Positions, since the names of the comparisons would be most of the file.
        comparisons = tuple(dict.fromkeys([*known.comparisons, *comparison.yardsticks]))
        bugs: dict[str, KeptBug] = {}
        for each in known.bugs:  # two of a name where branches were merged
            bugs[each.name] = _newest(bugs.get(each.name), each)
        older: list[str] = []
        for each in (one for one in scored if one.operation == operation):
            before = bugs.get(each.name)
            new = KeptBug(
                name=each.name,
                control=each.control,
                killed=each.killed,
                judged=each.judged,
                seconds=None if each.seconds is None else round(each.seconds, 1),
                laws=each.laws,
                rejected_by=_rejected_by(each.name, comparison, comparisons, before),
                date=run.date,
            )
            bugs[each.name] = _newest(before, new)
            if bugs[each.name] is before:
                older.append(f"{each.name}: {OLDER}")
        rows = tuple(sorted(bugs.values(), key=lambda row: row.name))
        score = KeptScore(operation, known.profile, comparisons, rows)
        files[name] = _lines(msgspec.to_builtins(score), "bugs"), older or [KEPT]
    return files


def _with_selections(path: Path, run: Mapping[str, Any]) -> Added:
    """Return the kept outcomes of a release, a file a chip: a newer sweep takes the place of one.

    Raises:
        RunError: only lists were read, or only one kind of call was asked about.
    """
    if run["level"] != LEVEL:
        message = f"{path}: it is {run['level']}: only what a release selects is kept"
        raise RunError(message)
    outcomes: dict[int, dict[Feature, str]] = {}
    for cell in run["cells"]:
        feature = Feature(**{"backend": "trtllm-gen", **cell["feature"]})
        outcomes.setdefault(cell["sm"], {})[feature] = cell["outcome"]
    files: Added = {}
    for sm, found in outcomes.items():
        if len(found) == 1:
            message = f"{path}: one kind of call is no sweep"
            raise RunError(message)
        kept = packed(sm, run["flashinfer"], run["artifact"], found)
        part = part_of(next(iter(found)).operation)
        name = "selected" if part == ATTENTION else f"selected-{part}"
        files[f"{name}-sm{sm}-{run['flashinfer']}.json"] = _lines(kept, "kinds"), [KEPT]
    return files


def _newest(before: KeptBug | None, each: KeptBug) -> KeptBug:
    """Return the row of the later run, whatever became of the bug; the second of one date."""
    return each if before is None or each.date >= before.date else before


def _unfit(run: Score, scored: Sequence[Bug]) -> str:
    """Return why a score cannot be kept; nothing if it can, even if it falls short."""
    if "interrupted" in run.shortfalls:
        return "a score that was interrupted cannot be kept: a bug may have lacked time"
    if not scored:
        return "it scores no bug that is kept; faults in Triton kernels are not"
    unseen = [each.name for each in scored if not each.judged]
    return f"no problem was judged of {', '.join(unseen)}" if unseen else ""


def _rejected_by(
    name: str, comparison: Comparison, comparisons: Sequence[str], known: KeptBug | None
) -> tuple[int, ...] | msgspec.UnsetType:
    """Return the comparisons that rejected a bug: what a run did not compare stays known."""
    before = msgspec.UNSET if known is None else known.rejected_by
    if name not in comparison.compared:
        return before
    rejected = {by: (*each.caught, *each.accused) for by, each in comparison.yardsticks.items()}
    numbers = () if before is msgspec.UNSET else before
    return tuple(
        number
        for number, by in enumerate(comparisons)
        if (name in rejected[by] if by in rejected else number in numbers)
    )


def _with_cells(path: Path, data: object, folder: Path) -> Added:
    """Return the kept cells of a run's chip and release, with those of the run that are not older.

    Of cells that ask the same, only those of the last date are read, and so only they are kept.

    Raises:
        RunError: a file has another shape, or the run no GPU, no FlashInfer or no date.
    """
    run = converted(data, GatingEvidence, path, RunError)
    sm, release = run.target.sm, run.target.flashinfer
    if sm is None or release is None:
        message = f"{path}: on a CPU, or without FlashInfer, no cell is tried that is kept"
        raise RunError(message)
    if not run.date:
        message = f"{path}: its cells have no date"
        raise RunError(message)
    name = f"gating-sm{sm}-{release}.json"
    known = _read(folder / name, GatingEvidence, GatingEvidence(run.target, ()))
    before, tried = _dated(known), _dated(run)
    if not tried:
        return {}
    last: dict[str, str] = {}
    for each in (*before, *tried):
        last[_question(each)] = max(last.get(_question(each), ""), each.date)
    cells = {
        (_question(each), each.cell): each
        for each in (*before, *tried)
        if each.date == last[_question(each)]
    }
    newest = max(run, known, key=lambda each: each.date)
    rows = [
        msgspec.structs.replace(each, date="" if each.date == newest.date else each.date)
        for each in sorted(cells.values(), key=_question)
    ]
    told = [
        f"{each.implementation}, {each.cell}: "
        f"{KEPT if each.date == last[_question(each)] else OLDER}"
        for each in tried
    ]
    file = {"schema": GATING, "target": newest.target, "date": newest.date, "trials": rows}
    return {name: (_lines(msgspec.to_builtins(file), "trials"), told)}


def _dated(cells: GatingEvidence) -> list[TrialTable]:
    """Return the cells that were run, each with its own date."""
    return [
        msgspec.structs.replace(each, date=each.date or cells.date)
        for each in cells.trials
        if each.outcome != NOT_RUN
    ]


def _question(cell: TrialTable) -> str:
    return json.dumps([cell.implementation, cell.feature], sort_keys=True)


def _with_units(path: Path, folder: Path) -> Added:
    """Return what was compiled on the day of a run, with the run's units in their places.

    Raises:
        RunError: what is kept of that day was compiled by another nvcc.
        EvidenceError: one of the files cannot be read.
    """
    run = read_compilation(path)
    file = folder / f"compile-{run.date}.json"
    known = read_compilation(file) if file.exists() else run
    if run.nvcc != known.nvcc:
        message = f"{file.name} is of nvcc {known.nvcc}, and the run is of {run.nvcc}"
        raise RunError(message)
    units = {each.order: each for each in (*known.records, *run.records)}
    larger = max(run, known, key=lambda each: len(each.records))
    whole = replace(larger, records=tuple(units.values()))
    return {file.name: (_lines(whole.to_json(), "records"), [KEPT])}


def _with_caught(path: Path, data: Mapping[str, Any], folder: Path) -> Added:
    """Return the laws that found each ledger entry, with those of a run.

    Raises:
        RunError: a file has another shape, or the run a problem that is none.
    """
    known = _read(folder / CAUGHT.name, dict[str, tuple[str, ...]], {})
    laws = {entry: set(names) for entry, names in known.items()}
    try:
        for entry, law in _caught_by(path, data):
            laws.setdefault(entry, set()).add(law)
    except ValueError as error:
        message = str(error) if isinstance(error, RunError) else f"{path}: {error}"
        raise RunError(message) from error
    rows = ",\n".join(
        f" {json.dumps(entry)}: {json.dumps(sorted(laws[entry]))}" for entry in sorted(laws)
    )
    return {CAUGHT.name: (f"{{\n{rows}\n}}\n", [KEPT])}


def _caught_by(path: Path, data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the ledger entries that explain a finding of a run, with each law of that finding."""
    entries = load_ledger().entries
    if data["schema"] == BUMP:
        known = {entry.id for entry in entries}
        for change in converted(data, Bump, path, RunError).findings:
            if change.entry in known:
                yield from ((change.entry, law) for law in change.laws)
    else:
        run = converted(data, Report, path, RunError)
        target = Target(**msgspec.structs.asdict(run.target))
        for found in run.findings:
            yield from ((each.id, found.law) for each in entries if _is(each, found, target))


def _is(entry: Entry, found: Finding, target: Target) -> bool:
    """Whether a finding of a run is an entry's; runs before the entry call it a failure."""
    status = entry.status if found.status == "KNOWN" else found.status
    if not entry.covers(found.implementation, target):
        return False
    if not found.problem:  # kept evidence names no problem that hangs or crashes
        alike = status == entry.status and (not entry.kinds or found.kind in entry.kinds)
        return alike and entry.of_law(found.law)
    verdict = Verdict.from_json({"status": status, "kind": found.kind})
    return entry.explains(found.law, verdict, problem_from_json(found.problem))


def _lines(data: Mapping[str, Any], rows: str) -> str:
    """Return JSON with a line for each field, and for each row of one of them."""
    fields = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in data.items() if k != rows]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in data[rows])
    return "{\n" + ",\n".join([*fields, f" {json.dumps(rows)}: [\n{lines}\n ]"]) + "\n}\n"


def _read(path: Path, kind: type[T], nothing: T) -> T:
    """Return what a file keeps, or what stands for a file that is not there."""
    if not path.exists():
        return nothing
    return converted(read_json(path, RunError), kind, path, RunError)
