"""Findings of behaviour: what differs between the outcomes of two releases."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ....impl.targets.target import Target
from ....properties.findings.cases import LONGEST_NAME, loading_name, replay_command
from ....properties.findings.files import Output, OutputError
from ....properties.findings.ledger import CASE_SCHEMA as CASE
from ....properties.findings.ledger import Entry
from ....properties.isolation.outcome import ABORTED_FOR_MEMORY, KILLED, KILLED_FOR_MEMORY
from ....properties.search.confirmation import first_again
from ....properties.search.ending import EndedError
from ....properties.search.shrinking import Shrink
from ....properties.search.simplify import Limit
from ....properties.verdicts.contained import OUT_OF_MEMORY
from ....properties.verdicts.text import compact, count_of
from ....properties.verdicts.verdict import Verdict
from ....reference import Problem
from ...releases.packages import FLASHINFER_PACKAGE
from ..sides.plan import DEADLINES, BumpPlan
from ..sides.releases import BASELINE, CANDIDATE, SIDES, Release
from ..verdicts.findings import Chip, Finding, finding
from .asking import Bench, answer_of
from .launched import launched_findings
from .records import DRAWN, Compared, Surveyed, Tried

NEW, WORSE, ALONE = "new-failure", "worse-failure", "candidate-only-failure"
STILL, FIXED, HANG, KNOWN = "still-failing", "fixed", "hang", "known-of-both"
FLAKY, FLAKY_BEFORE = "flaky", "baseline-flaky"
CONFIRMED = "confirmed"
SEVERE = ("HANG", "CRASH")
MOST_TRIES, MOST_DEATHS = 80, 4
"""Most tries of shrinking a problem, and most of them that may cost a process."""
LOOKS = 3
"""Most runs of a baseline that is wrong where the candidate hangs or dies, for all such failures of
a law."""
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
        bench: the bench that is asked again.
        releases: the releases by side, for replays.
        targets: the targets by side, for the ledger.
        chips: the chips on which the findings hold; everywhere if empty.
    """

    bench: Bench
    releases: Mapping[str, Release]
    targets: Mapping[str, Target]
    chips: tuple[Chip, ...]

    @property
    def names(self) -> dict[str, str]:
        """The sides' versions."""
        return {
            side: self.targets[side].version_of(release.package.distribution) or release.given
            for side, release in self.releases.items()
        }


@dataclass(frozen=True)
class Shown:
    """Failures of one change, after they were run again.

    Attributes:
        change, where: what they are of.
        members: the failures, each with the ledger entry that explains it.
        tried: the failure that speaks for them: one that showed again, if one did.
        again: whether one did, or none had to.
        missed: how many did not.
        settled: whether there was time to see.
    """

    change: str
    where: str
    members: Sequence[tuple[Tried, Entry | None]]
    tried: Tried
    again: bool = True
    missed: int = 0
    settled: bool = True


@dataclass(frozen=True)
class Examined:
    """What the failures of all implementations come to.

    Attributes:
        compared: the comparison with what was learned when failures were run again.
        findings: each with its smallest problem.
        unsettled: implementations with a failure that there was no time to run again.
        unwritten: sentences about cases that could not be written.
        error: why it ended early, a device or a suite that failed; None if it did not.
    """

    compared: tuple[Compared, ...]
    findings: tuple[Finding, ...] = ()
    unsettled: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()
    error: Exception | None = None


def examine(compared: Sequence[Compared], context: Context) -> Examined:
    """Run failures again, make one of each kind small, and return the findings.

    All failures are run again before any is made small: a verdict needs the first, and the time may
    be over before the second.
    """
    context.bench.progress.examined.expect(2 * len(compared))
    findings: list[Finding] = []
    unwritten: list[str] = []
    error: Exception | None = None
    with ThreadPoolExecutor(context.bench.plan.threads) as threads:
        looked = list(threads.map(partial(_look_again, context), compared))
        made = threads.map(partial(_findings_of, context), looked)
        try:
            for found, lost in made:
                findings += found
                unwritten += lost
        except Exception as early:  # noqa: BLE001  what came before it is worth a report
            error = early
    return Examined(
        tuple(found for found, _ in looked),
        tuple(findings),
        tuple(found.name for found, shown in looked if not all(each.settled for each in shown)),
        tuple(unwritten),
        error,
    )


def _look_again(context: Context, found: Compared) -> tuple[Compared, list[Shown]]:
    """Run failures of one side again, and return all of them in groups."""
    known = (replace(t, known_before=_known_before(t, found, context)) for t in found.tried)
    found = replace(found, tried=tuple(known))
    for (change, _), members in _groups(found, context).items():
        if change == WORSE:
            for law in dict.fromkeys(tried.law for tried, _ in members):
                worse = [tried for tried, _ in members if tried.law == law]
                with suppress(EndedError):
                    found = _look_before(worse, found, context)
    groups = _groups(found, context)
    shown = [_run_again(*group, members, found, context) for group, members in groups.items()]
    context.bench.progress.examined.add()
    return found, shown


def _run_again(
    change: str,
    where: str,
    members: Sequence[tuple[Tried, Entry | None]],
    found: Compared,
    context: Context,
) -> Shown:
    """Run failures again until one shows again."""
    ordered = _one_of_each_law_first([each for each, _ in members])
    first, shown = ordered[0], Shown(change, where, members, ordered[0])
    bad = [side for side in found.runs if first.bad(side)]
    # One that both sides have needs no second look: two processes have shown it.
    if members[0][1] is not None or len(bad) != 1:
        return shown
    look = partial(_look, found, context.bench, bad[0], itertools.repeat(CONFIRMED))
    try:
        tried, missed = first_again(ordered, look, most=MOST_LOOKS)
    except EndedError:
        return replace(shown, settled=False)
    return replace(shown, tried=tried or first, again=tried is not None, missed=missed)


def _findings_of(
    context: Context, looked: tuple[Compared, Sequence[Shown]]
) -> tuple[list[Finding], list[str]]:
    """Return an implementation's findings, and sentences about cases that cannot be written."""
    found, shown = looked
    made = [_finding(each, found, context) for each in shown]
    lost = _lost(found, context)
    findings = [*(each for each, _ in made), *lost, *_bits(found, context.chips)]
    findings += launched_findings([found], context.chips)
    context.bench.progress.examined.add()
    return findings, [why for _, why in made if why]


def _groups(
    found: Compared, context: Context
) -> dict[tuple[str, str], list[tuple[Tried, Entry | None]]]:
    """Put failures together that are of one change, and that one entry or verdict speaks of."""
    groups: dict[tuple[str, str], list[tuple[Tried, Entry | None]]] = {}
    for tried in found.tried:
        change = change_of(tried, found)
        if change:
            entry = entry_of(tried, change, found, context)
            verdict = tried.verdict
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
        for entry in context.bench.plan.ledger.entries
    )


def _look_before(worse: Sequence[Tried], found: Compared, context: Context) -> Compared:
    """Run one law's failures that are worse with the candidate again with the baseline.

    A race shows itself as a wrong answer here and as a hang there: one run of each says nothing of
    the releases. Each of ``LOOKS`` looks is in a fresh process, at the next of the failures.
    """
    notes = (f"{CONFIRMED} {number}" for number in itertools.count())
    look = partial(_look, found, context.bench, BASELINE, notes)
    ordered = itertools.cycle(sorted(worse, key=lambda each: each.problem.work))
    if first_again(ordered, look, most=LOOKS, shows=_is_severe)[0] is None:
        return found
    known = set(map(id, worse))
    tried = (replace(t, severe_before=True) if id(t) in known else t for t in found.tried)
    return replace(found, tried=tuple(tried))


def _is_severe(verdict: Verdict) -> bool:
    """Whether a verdict is a hang or a death; a machine that is too full says nothing."""
    outside = (OUT_OF_MEMORY, ABORTED_FOR_MEMORY, KILLED, KILLED_FOR_MEMORY)
    return verdict.status in SEVERE and verdict.kind not in outside


def _look(found: Compared, bench: Bench, side: str, notes: Iterator[str], tried: Tried) -> Verdict:
    """Judge a failure again in a fresh process of a side; a note keeps each look's answer apart."""
    request = tried.request(found.addresses[side])
    outcome = bench.sides[side].ask(request, DEADLINES, note=next(notes), fresh=True)
    return answer_of(outcome)


def change_of(tried: Tried, found: Surveyed) -> str:
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


def entry_of(tried: Tried, change: str, found: Surveyed, context: Context) -> Entry | None:
    """Return the ledger's entry that explains a change, if one does."""
    side = BASELINE if change == FIXED else CANDIDATE
    known = context.bench.plan.ledger.explanation(
        found.name, tried.law, tried.verdicts[side], tried.problem, context.targets[side]
    )
    return known or tried.entry


def _finding(shown: Shown, found: Compared, context: Context) -> tuple[Finding, str]:
    """Return a finding, and why its case cannot be written; empty where it can."""
    change, members, tried, entry = shown.change, shown.members, shown.tried, shown.members[0][1]
    if not shown.again:
        change = FLAKY if tried.bad(CANDIDATE) else FLAKY_BEFORE
    elif entry is None and shown.settled and not tried.case:  # a stored case is small already
        tried = _shrink(tried, found, context.bench)
    verdict = tried.verdict
    words = WORDS[change].format(**context.names)
    message = f"{found.name}: {words}: {verdict.message or verdict.status}"
    if shown.missed and shown.again:
        message += f" ({count_of(shown.missed, 'other problem')} failed so once and not again)"
    if not shown.settled:
        message += " (seen once: the comparison ended before it was tried again)"
    by_law = list(dict.fromkeys(each.law for each, _ in members))
    plan, case, unwritten = context.bench.plan, tried.case and tried.case.path, ""
    if case is None:
        try:
            case = _write_case(tried, found, plan)
        except OutputError as error:  # which costs no finding
            unwritten = str(error)
    made = finding(
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
            side: replay_with(case, context.releases[side], plan.sources)
            for side in found.runs
            if case
        },
        entry=entry.id if entry else "",
        issue=entry.issue if entry else "",
        reason=" ".join(entry.reason.split()) if entry else "",
        found_by=tuple(sorted({each.found_by for each, _ in members}, reverse=True)),
        count=len(members),
    )
    return made, unwritten


def _one_of_each_law_first(members: Sequence[Tried]) -> list[Tried]:
    """Order failures by their work, the smallest of each law before the others."""
    ordered = sorted(members, key=lambda each: (each.problem.work, each.law))
    smallest = {each.law: each for each in reversed(ordered)}
    return sorted(ordered, key=lambda each: smallest[each.law] is not each)


def _shrink(tried: Tried, found: Compared, bench: Bench) -> Tried:
    """Make the problem of a failure small: the smaller one fails on the same sides, and alike."""
    if found.axes is None:
        return tried
    budget, deaths = Limit(math.inf, MOST_TRIES), 0  # not by the clock: it goes on alike

    def again(problem: Problem) -> Tried | None:
        nonlocal deaths
        if deaths >= MOST_DEATHS or budget.spent():
            return None
        verdicts = {}
        for side in found.runs:
            request = found.addresses[side].case(tried.law, problem)
            outcome = bench.sides[side].ask(request, DEADLINES)
            deaths += outcome.died
            verdicts[side] = answer_of(outcome)
        if not all(tried.verdicts[side].is_like(verdicts[side]) for side in found.runs):
            return None
        return replace(tried, problem=problem, verdicts=verdicts, found_by=DRAWN, case=None)

    shrink = Shrink(tried, found.axes, again)
    with suppress(EndedError):  # the smallest so far fails too
        shrink.simplify()
        shrink.by_fields(Limit(math.inf, MOST_TRIES))
    return shrink.smallest


def _side(verdict: Verdict | None) -> dict[str, Any]:
    if verdict is None:
        return {"status": "not there"}
    fields = {"status": verdict.status, "kind": verdict.kind, "message": verdict.message}
    element = {"element": dict(verdict.element)} if verdict.element else {}
    return {**fields, "ratio": verdict.ratio, **element}


def _write_case(tried: Tried, found: Compared, plan: BumpPlan) -> Path:
    """Write a case file for a finding, and return its path as commands name it.

    Raises:
        OutputError: the file cannot be written.
    """
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
        "verdict": tried.verdict.to_json(),
        **({"soak": plan.soak} if tried.law == "soak" else {}),
    }
    Output("--cases", path).write(data)
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
    changed = [each for each in found.tried if each.same_bits is False and each.both_pass]
    if not changed:
        return
    compared = sum(1 for each in found.tried if each.same_bits is not None and each.both_pass)
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
