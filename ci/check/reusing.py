"""What passed in the check before and is not asked again, where all that it depends on is equal."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...impl.registry import resolve_name
from ...impl.targets.unpacked import folders
from ...properties.findings.report import ImplementationReport, LawReport
from ...properties.isolation.reads import PROGRAM, Read
from ...properties.search.engine import Run
from ...properties.search.plan import Plan
from ...properties.space.profiles import Cost
from ..answers.identity import (
    digest_of,
    files_of_module,
    journal_path,
    own_code,
)
from ..answers.journal import Journal, JournalError
from ..answers.records import from_data, to_data
from ..console.errors import MachineError
from ..reports.summary import state
from .repeated import PASSED

COSTS = {"costs": ""}
"""The question of which cost classes implementations have: what is drawn depends on it."""
MOST_CHECKS = 20
"""Most checks of which a folder of cases keeps what passed; the oldest go first."""
LARGEST_READ = 4 << 20
"""Bytes of a file above which its size and time stand for its content."""
NO_PART = (
    "_", "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "OLDPWD", "PYTEST_CURRENT_TEST", "PWD",
    "SHLVL", "BUILDKITE", "GITHUB_", "RUNNER_", "SSH_", "TERM", "TMUX", "WINDOWID", "XDG_",
)  # fmt: skip
"""Environment variables, or beginnings of them, that change between two equal checks; the first
stands for itself."""


def passed_path(cases: Path, plan: Plan) -> Path:
    """Return the path of what passed in the last check that was asked for the same."""
    return cases / journal_path(cases, plan).name.replace("journal-", PASSED)


def surroundings(plan: Plan) -> dict[str, Any]:
    """Return what results depend on beside the identity that a resumed run has."""
    return {
        "all of kernelproof": own_code(("reference", "impl", "properties", "fixtures", "ci")),
        "folder": str(Path.cwd()),
        "limits": [plan.jobs, repr(plan.seconds)],
        "interpreter": [sys.version, sys.prefix],
        "packages": digest_of(name.encode() for name in _distributions()),
        "environment": digest_of(f"{k}={v}\0".encode() for k, v in sorted(_environment().items())),
        "processor": _first_line(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "driver": _first_line(Path("/proc/driver/nvidia/version")),
        "engines": {str(each): _stamps(each) for each in folders()},
    }


def _distributions() -> list[str]:
    """Return the names of what is installed, with the versions."""
    folders = sorted({Path(each or ".") for each in sys.path})
    return [
        each.name
        for folder in folders
        if folder.is_dir()
        for each in sorted(folder.iterdir())
        if each.suffix in (".dist-info", ".egg-info")
    ]


def _environment() -> dict[str, str]:
    own, *others = NO_PART
    return {k: v for k, v in os.environ.items() if k != own and not k.startswith((*others,))}


def _first_line(file: Path, begin: str = "") -> str:
    with suppress(OSError, UnicodeDecodeError):
        lines = file.read_text(encoding="utf-8").splitlines()
        return next((line for line in lines if line.startswith(begin)), "")
    return ""


def _stamps(folder: Path) -> str:
    """Return a fingerprint of a folder's files by their sizes and times: engines are large."""
    found = []
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                state = Path(place, name).stat()
                found.append(f"{place} {name} {state.st_size} {state.st_mtime_ns}")
    return digest_of(each.encode() for each in sorted(found))


def fingerprints(read: Iterable[Read], since: float = 0.0) -> dict[str, str] | None:
    """Return what was read as it is now; None where that is not known.

    Args:
        read: what processes have read.
        since: time in seconds since the epoch; what was changed after it, but not by these
            processes, is not what they read.
    """
    seen = set(read)
    written = {each.name for each in seen if each.kind == "written"}
    found: dict[str, str] = {}
    for kind, name in seen:
        if kind == PROGRAM:
            return None
        if kind == "module":
            found[f"module {name}"] = _place_of(name)
        elif kind == "file":
            file = _source_of(name)
            if since and name not in written and _changed(file, since):
                return None
            found[f"file {file}"] = _content(file)
    return found


def _as_before(known: Mapping[str, str]) -> bool:
    read = (Read(*each.split(" ", 1)) for each in known)
    return fingerprints(read) == known


def _source_of(name: str) -> str:
    """Return the source of a compiled file of Python, any other file itself."""
    with suppress(ValueError):
        source = importlib.util.source_from_cache(name)
        if Path(source).is_file():
            return source
    return name


def _place_of(module: str) -> str:
    """Return where a module is found by its name: another file of that name may come first."""
    return next((str(each) for each in files_of_module(module)), "")


def _changed(file: str, since: float) -> bool:
    with suppress(OSError):
        state = Path(file).stat()
        return max(state.st_mtime, state.st_ctime) >= since and not Path(file).is_dir()
    return False


def _content(file: str) -> str:
    """Return a fingerprint of a file; empty where there is none."""
    with suppress(OSError):
        state = Path(file).stat()
        if state.st_size > LARGEST_READ:
            return f"{state.st_size} bytes of {state.st_mtime_ns}"
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    return ""


@dataclass(frozen=True)
class Passed:
    """What passed in the check before.

    Attributes:
        whole: reports of implementations of which all laws passed, by the names in the plan.
        costs: cost classes by which the problems of implementations were drawn.
        dates: the date of the check, by the references of implementations of which all is equal.
        answers: journal of that check.
        around: what the results of this check depend on besides, see ``surroundings``.
    """

    whole: Mapping[str, ImplementationReport] = field(default_factory=dict)
    costs: Mapping[str, Cost] = field(default_factory=dict)
    dates: Mapping[str, str] = field(default_factory=dict)
    answers: Journal = field(default_factory=lambda: Journal(None))
    around: Mapping[str, Any] = field(default_factory=dict)

    def recall(self, reference: str, question: Mapping[str, Any]) -> LawReport | None:
        """Return what a law found of an implementation, if it passed."""
        if reference not in self.dates:
            return None
        answer = self.answers.recall(question, from_data)
        law: LawReport | None = answer and answer["law"]
        if law is None or law.verdict != "PASS":
            return None
        return replace(law, reused=law.reused or self.dates[reference])

    def keep(self, journal: Journal) -> None:
        """Keep what is not asked again in the journal of this check, for the next one."""
        for report in self.whole.values():
            read = self.answers.recall(_read_by(report), dict)
            journal.keep(_read_by(report), read)
            journal.keep(_whole(report), to_data(report))


def _read_by(report: ImplementationReport) -> dict[str, str]:
    return {"read by": report.reference}


def _whole(report: ImplementationReport) -> dict[str, str]:
    return {"whole": report.reference}


def can_be_reused(plan: Plan) -> bool:
    """Whether another check may take the results: not where it draws others, or trusts none."""
    return not (plan.profile.explore or plan.distrust)


def passed_before(cases: Path, plan: Plan, identity: Mapping[str, Any], *, reuse: bool) -> Passed:
    """Return what passed in the last check that was asked for the same; nothing if that changed.

    Args:
        cases: the folder of the check's cases.
        plan: the plan of the check.
        identity: what the results of the plan depend on here.
        reuse: whether what passed is asked for.
    """
    path, around = passed_path(cases, plan), surroundings(plan)
    if not (reuse and can_be_reused(plan) and path.exists()):
        return Passed(around=around)
    try:
        with Journal(path, flag="--cases") as answers:
            answers.start(identity, resume=True)
            answers.require("surroundings", around)
            return _equal(plan, answers, around)
    except (JournalError, MachineError):  # of other code, or unreadable: all is asked again
        return Passed(around=around)


def _equal(plan: Plan, answers: Journal, around: Mapping[str, Any]) -> Passed:
    whole, dates = {}, {}
    for name in plan.implementations:
        blank = ImplementationReport(name, resolve_name(name))
        about = answers.recall(_read_by(blank), dict)
        if about is None or not _as_before(about["read"]):
            continue
        dates[blank.reference] = about["date"]
        report: ImplementationReport | None = answers.recall(_whole(blank), from_data)
        if report is not None:
            laws = [replace(law, reused=law.reused or about["date"]) for law in report.laws]
            whole[name] = replace(report, laws=laws)
    return Passed(whole, answers.recall(COSTS, from_data) or {}, dates, answers, around)


def keep_passed(
    cases: Path, plan: Plan, journal: Journal, run: Run, around: Mapping[str, Any]
) -> None:
    """Keep the journal of a check that has ended, for the next one that is asked for the same.

    Args:
        cases: the folder of the check's cases.
        plan: the plan of the check, as it was asked for.
        journal: its journal, which has what each law found.
        run: the check.
        around: its surroundings when it began.
    """
    started = run.report.milestones.started
    date = datetime.fromtimestamp(started, timezone.utc).isoformat(timespec="minutes")
    for report in run.asked:
        read = fingerprints(run.read(report), started)
        if read is not None:
            journal.keep(_read_by(report), {"date": date, "read": read})
            if state(report) == "PASS":
                journal.keep(_whole(report), to_data(report))
    journal.require("surroundings", around)
    journal.move(passed_path(cases, plan))
    kept = sorted(cases.glob(f"{PASSED}*.jsonl"), key=lambda file: file.stat().st_mtime)
    for file in kept[:-MOST_CHECKS]:
        file.unlink(missing_ok=True)
