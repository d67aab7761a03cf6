"""Findings of behaviour: what differs between the outcomes of two releases."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ....impl.targets.target import Target
from ....properties.findings.cases import LONGEST_NAME, loading_name, replay_command
from ....properties.findings.files import Output, OutputError
from ....properties.findings.ledger import CASE_SCHEMA as CASE
from ....properties.findings.ledger import Entry
from ....properties.verdicts.text import compact, count_of
from ....properties.verdicts.verdict import Verdict
from ...releases.packages import FLASHINFER_PACKAGE
from ..sides.ending import EndedError
from ..sides.plan import Plan
from ..sides.releases import BASELINE, CANDIDATE, SIDES, Release
from ..verdicts.findings import Chip, Finding, finding
from .comparison import SEVERE, Compared, Sides, Tried, as_severe_before, confirmed, shrink
from .watching import Count

NEW, WORSE, ALONE = "new-failure", "worse-failure", "candidate-only-failure"
STILL, FIXED, HANG, KNOWN = "still-failing", "fixed", "hang", "known-of-both"
FLAKY, FLAKY_BEFORE = "flaky", "baseline-flaky"
MOST_LOOKS = 8
"""Most failures of one kind that are run again, each in a fresh process, until one shows again."""
WORDS = {
    NEW: "right with {baseline}, wrong with {candidate}",
    WORSE: "wrong with both, and worse with {candidate}",
    ALONE: "wrong with {candidate}; {baseline} does not have it",
    STILL: "wrong with {baseline} and with {candidate}",
    KNOWN: "wrong with {candidate}, as the ledger knows it of {baseline} too, by chance",
    FIXED: "wrong with {baseline}, right with {candidate}",
    FLAKY: "failed once with {candidate} and not again",
    FLAKY_BEFORE: "failed once with {baseline} and not again, right with {candidate}",
    HANG: "does not end with {candidate}",
}
RULES = {
    NEW: "do not run these calls of {name} before it is fixed",
    WORSE: "do not run these calls of {name} before it is fixed",
    HANG: "do not run these calls of {name} before it is fixed",
    FLAKY: "soak {name} before the bump: kernelproof check {name} --law soak --soak 5000",
}


@dataclass(frozen=True)
class Context:
    """What findings are made with.

    Attributes:
        sides: that shrinking asks.
        plan: of the comparison.
        releases: by side, for replays.
        targets: by side, for the ledger.
        chips: on which the findings hold; everywhere if empty.
        unwritten: sentences about cases that cannot be written.
        examined: counts, of each implementation, that its failures were run again, and made small.
        unsettled: the implementation of each failure that there was no time to run again.
    """

    sides: Sides
    plan: Plan
    releases: Mapping[str, Release]
    targets: Mapping[str, Target]
    chips: tuple[Chip, ...]
    unwritten: list[str] = field(default_factory=list)
    examined: Count = field(default_factory=lambda: Count(""))
    unsettled: list[str] = field(default_factory=list)

    @property
    def names(self) -> dict[str, str]:
        """The sides' versions."""
        return {
            side: self.targets[side].version_of(release.package.distribution) or release.given
            for side, release in self.releases.items()
        }


def behaviour_findings(compared: Sequence[Compared], context: Context) -> Iterator[Finding]:
    """Return the findings of all implementations, each with its smallest problem.

    All failures are run again before any is made small: a verdict needs the first, and the time may
    be over before the second.
    """
    context.examined.expect(2 * len(compared))
    with ThreadPoolExecutor(context.plan.threads) as threads:
        shown = list(threads.map(lambda each: _shown(each, context), compared))
        for found in threads.map(
            lambda each, its: list(_findings_of(each, its, context)), compared, shown
        ):
            yield from found


@dataclass(frozen=True)
class _Shown:
    """Failures of one change, after they were run again.

    Attributes:
        change, where: what they are of.
        members: the failures, each with the ledger entry that explains it.
        tried: the failure that speaks for them: one that showed again, if one did.
        again: whether one did, or none had to.
        missed: how many did not before it.
        settled: whether there was time to see.
    """

    change: str
    where: str
    members: Sequence[tuple[Tried, Entry | None]]
    tried: Tried
    again: bool = True
    missed: int = 0
    settled: bool = True


def _shown(found: Compared, context: Context) -> list[_Shown]:
    """Run failures of one side again, and return all of them in groups."""
    found.tried = [
        replace(tried, known_before=_known_before(tried, found, context)) for tried in found.tried
    ]
    for (change, _), members in _groups(found, context).items():
        if change == WORSE:
            for law in dict.fromkeys(tried.law for tried, _ in members):
                worse = [tried for tried, _ in members if tried.law == law]
                with suppress(EndedError):
                    _look_before(worse, found, context)
    groups = _groups(found, context)
    shown = [_run_again(*group, members, found, context) for group, members in groups.items()]
    context.examined.add()
    return shown


def _run_again(
    change: str,
    where: str,
    members: Sequence[tuple[Tried, Entry | None]],
    found: Compared,
    context: Context,
) -> _Shown:
    ordered = _one_of_each_law_first([each for each, _ in members])
    shown = _Shown(change, where, members, ordered[0])
    if members[0][1] is not None:
        return shown
    try:
        tried, missed = _shown_again(ordered, found, context.sides)
    except EndedError:
        context.unsettled.append(found.name)
        return replace(shown, settled=False)
    return replace(shown, tried=tried or ordered[0], again=tried is not None, missed=missed)


def _findings_of(found: Compared, shown: Sequence[_Shown], context: Context) -> Iterator[Finding]:
    for each in shown:
        yield _finding(each, found, context)
    yield from _lost(found, context)
    yield from _bits(found, context.chips)
    context.examined.add()


def _groups(
    found: Compared, context: Context
) -> dict[tuple[str, str], list[tuple[Tried, Entry | None]]]:
    """Put failures together that are of one change, and that one entry or verdict speaks of."""
    groups: dict[tuple[str, str], list[tuple[Tried, Entry | None]]] = {}
    for tried in found.tried:
        change = change_of(tried, found)
        if change:
            entry = entry_of(tried, change, found, context.plan, context.targets)
            verdict = _telling(tried, change)
            where = entry.id if entry else f"{verdict.status} {verdict.kind}"
            groups.setdefault((change, where), []).append((tried, entry))
    return groups


def _known_before(tried: Tried, found: Compared, context: Context) -> bool:
    """Whether a failure is new or worse with the candidate by chance: the ledger has it of both.

    A race that both have may hang with one of them, and give a wrong answer with the other. A right
    answer proves nothing only of what is known to go by chance.
    """
    change, verdict = change_of(tried, found), tried.verdicts.get(CANDIDATE)
    if change not in (NEW, WORSE, HANG) or verdict is None:
        return False
    sides = (BASELINE,) if change == WORSE else SIDES
    return any(
        (change == WORSE or entry.by_chance)
        and all(entry.covers(found.name, context.targets[side]) for side in sides)
        and entry.explains(tried.law, verdict, tried.problem)
        for entry in context.plan.ledger.entries
    )


def _look_before(worse: Sequence[Tried], found: Compared, context: Context) -> None:
    """Run one law's failures that are worse with the candidate again with the baseline."""
    ordered = sorted(worse, key=lambda each: each.problem.work)
    if as_severe_before(ordered, found, context.sides):
        known = set(map(id, worse))
        found.tried = [
            replace(tried, severe_before=True) if id(tried) in known else tried
            for tried in found.tried
        ]


def change_of(tried: Tried, found: Compared) -> str:
    """Return the change that one problem shows; empty where it shows none."""
    before, after = tried.verdicts.get(BASELINE), tried.verdicts.get(CANDIDATE)
    old, new = tried.bad(BASELINE), tried.bad(CANDIDATE)
    if new and not old and tried.known_before:
        return KNOWN
    if new and after is not None and after.status == "HANG" and not old:
        return HANG if BASELINE in found.runs else ALONE
    if new and not (before is not None and tried.judged(BASELINE)):
        return ALONE
    if new and old and before is not None and after is not None:
        severe_before = tried.severe_before or tried.known_before or before.status in SEVERE
        return WORSE if after.status in SEVERE and not severe_before else STILL
    if new:
        return NEW
    return FIXED if old and tried.judged(CANDIDATE) else ""


def _telling(tried: Tried, change: str) -> Verdict:
    """Return the verdict that a finding is about."""
    failing = [side for side in reversed(SIDES) if tried.bad(side)]
    return tried.verdicts[BASELINE if change == FIXED else failing[0]]


def entry_of(
    tried: Tried, change: str, found: Compared, plan: Plan, targets: Mapping[str, Target]
) -> Entry | None:
    """Return the ledger's entry that explains a change, if one does."""
    side = BASELINE if change == FIXED else CANDIDATE
    known = plan.ledger.explanation(
        found.name, tried.law, tried.verdicts[side], tried.problem, targets[side]
    )
    return known or tried.entry


def _finding(shown: _Shown, found: Compared, context: Context) -> Finding:
    change, members, tried, entry = shown.change, shown.members, shown.tried, shown.members[0][1]
    if not shown.again:
        change = FLAKY if tried.bad(CANDIDATE) else FLAKY_BEFORE
    elif entry is None and shown.settled and not tried.case:  # a stored case is small already
        tried = shrink(tried, found, context.sides)
    verdict = _telling(tried, change)
    words = WORDS[change].format(**context.names)
    message = f"{found.name}: {words}: {verdict.message or verdict.status}"
    if shown.missed and shown.again:
        message += f" ({count_of(shown.missed, 'other problem')} failed so once and not again)"
    if not shown.settled:
        message += " (seen once: the comparison ended before it was tried again)"
    by_law = list(dict.fromkeys(each.law for each, _ in members))
    case = tried.case.path if tried.case else _case(tried, found, context)
    return finding(
        change,
        found.name,
        " ".join(message.split()),
        detail=re.sub(r"[^\w.-]+", "-", shown.where).strip("-").lower(),
        chips=context.chips,
        rule=RULES.get(change, "").format(name=found.name),
        baseline=_side(tried.verdicts.get(BASELINE)),
        candidate=_side(tried.verdicts.get(CANDIDATE)),
        laws=tuple(by_law),
        problem={**tried.problem.to_json(), "id": tried.problem.id, "told": compact(tried.problem)},
        replay={
            side: replay_with(case, context.releases[side], context.plan.sources)
            for side in found.runs
            if case
        },
        entry=entry.id if entry else "",
        issue=entry.issue if entry else "",
        reason=" ".join(entry.reason.split()) if entry else "",
        found_by=tuple(sorted({each.found_by for each, _ in members}, reverse=True)),
        count=len(members),
    )


def _one_of_each_law_first(members: Sequence[Tried]) -> list[Tried]:
    """Order failures by their work, the smallest of each law before the others."""
    ordered = sorted(members, key=lambda each: (each.problem.work, each.law))
    smallest = {each.law: each for each in reversed(ordered)}
    return sorted(ordered, key=lambda each: smallest[each.law] is not each)


def _shown_again(
    ordered: Sequence[Tried], found: Compared, sides: Sides
) -> tuple[Tried | None, int]:
    """Return the first failure that shows again, and how many before it did not.

    One failure that comes and goes must not speak for others that stay.
    """
    for missed, tried in enumerate(ordered[:MOST_LOOKS]):
        if confirmed(tried, found, sides):
            return tried, missed
    return None, min(len(ordered), MOST_LOOKS)


def _side(verdict: Verdict | None) -> dict[str, Any]:
    if verdict is None:
        return {"status": "not there"}
    fields = {"status": verdict.status, "kind": verdict.kind, "message": verdict.message}
    element = {"element": dict(verdict.element)} if verdict.element else {}
    return {**fields, "ratio": verdict.ratio, **element}


def _case(tried: Tried, found: Compared, context: Context) -> Path | None:
    """Write a case file for a finding, and return its path as commands name it.

    It is None where the file cannot be written, which costs no finding.
    """
    plan = context.plan
    name = re.sub(r"[^\w.-]+", "-", found.name)[:LONGEST_NAME]  # it may be a path
    path = plan.cases / f"bump-{name}-{tried.law}-{tried.problem.id}.json"
    path_as = (plan.cases_as or plan.cases) / path.name
    data = {
        "schema": CASE,
        "law": tried.law,
        "implementation": loading_name(found.name),
        "operation": None,
        "problem": tried.problem.to_json(),
        "device": plan.device,
        "verdict": _telling(tried, STILL).to_json(),
        **({"soak": plan.soak} if tried.law == "soak" else {}),
    }
    try:
        Output("--cases", path).write(data)
    except OutputError as error:
        context.unwritten.append(str(error))
        return None
    return path_as


def replay_with(case: Path, release: Release, sources: Sequence[Path]) -> str:
    """Return the command that judges a case with one of the releases and folders of ``--from``."""
    of = "" if release.package is FLASHINFER_PACKAGE else f" --package {release.package.name}"
    return f"{replay_command(case, sources)} --release {shlex.quote(release.shared)}{of}"


def _lost(found: Compared, context: Context) -> Iterator[Finding]:
    """Return findings where the candidate does not run what the baseline did."""
    names, chips = context.names, context.chips
    if found.runs == (BASELINE,):
        why = found.errors.get(CANDIDATE) or found.reasons.get(CANDIDATE, "")
        yield finding(
            "implementation-lost",
            found.name,
            f"{found.name} runs with {names[BASELINE]} and not with {names[CANDIDATE]}: {why}",
            chips=chips,
            rule=f"replace {found.name} before the bump",
        )
    lost = found.refused.get(CANDIDATE, {})
    if lost:
        value, why = next(iter(lost.items()))
        more = f" (and {len(lost) - 1} more values)" if len(lost) > 1 else ""
        yield finding(
            "implementation-lost",
            found.name,
            f"{found.name} no longer takes {value}{more}: {why}",
            detail="values",
            chips=chips,
            rule=f"do not ask {found.name} for {', '.join(lost)}",
            candidate=lost,
            count=len(lost),
        )


def _bits(found: Compared, chips: tuple[Chip, ...]) -> Iterator[Finding]:
    """Return a finding where results changed though both are within the bound."""
    changed = [each for each in found.tried if each.same_bits is False and both_pass(each)]
    if not changed:
        return
    compared = sum(1 for each in found.tried if each.same_bits is not None and both_pass(each))
    worst = max(changed, key=lambda each: (each.difference or {}).get("largest") or 0.0)
    largest = (worst.difference or {}).get("largest")
    by = f", by {largest:.3g} at most" if largest is not None else ""
    yield finding(
        "bits-changed",
        found.name,
        f"{found.name}: other bits on {len(changed)} of {compared} problems{by}, all inside of "
        f"the error bound",
        chips=chips,
        problem={**worst.problem.to_json(), "id": worst.problem.id, "told": compact(worst.problem)},
        candidate=worst.difference or {},
        count=len(changed),
    )


def both_pass(tried: Tried) -> bool:
    """Whether both sides were judged, and are right."""
    return all(tried.judged(side) and not tried.verdicts[side].bad for side in SIDES)
