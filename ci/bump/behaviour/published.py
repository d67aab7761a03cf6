"""What both releases make of the calls that they publish, see ``ci/published``."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from ....properties.findings.report import TIME
from ....properties.search.building import compilers, limited_to
from ....properties.search.ending import Ending
from ...published.asking import NO_MEMORY, Asked
from ...published.host import HANDLER
from ...published.including import (
    FAILED,
    LEFT_OUT,
    SECONDS,
    SHARE,
    UNSUPPORTED,
    judge_part,
    without,
)
from ...reports.published_calls import TITLE, broken_laws, sentence
from ..sides.releases import BASELINE, SIDES, Release
from ..verdicts.findings import Chip, Finding, finding
from .asking import Bench
from .records import Comparison

KNOWN = "ci/published/known.py"
"""What explains a known finding."""
REFERENCE = "its own reference"
"""The law that a call's reference breaks, of ``broken_laws``."""
Call = Mapping[str, Any]


def compare_published(
    comparison: Comparison, bench: Bench, chips: tuple[Chip, ...], part: str
) -> Comparison:
    """Judge the published calls of both releases, on a GPU, and compare their findings.

    Args:
        comparison: the record so far.
        bench: the bench, whose journal keeps a side's answer if it is whole.
        chips: the chips on which the findings hold.
        part: the option by which only a part of the behaviour was asked for; empty if none was.
    """
    said = without(bench.plan.device, part)
    # Whether flashinfer is installed beside this Kernelproof says nothing of the two releases.
    if said.get("state") == LEFT_OUT:
        return comparison.skipping({TITLE: said["why"]})
    started = time.monotonic()
    bench.progress.tell("judging what both releases publish of their calls")

    known = {side: bench.journal.recall(_question(side), dict[str, Any]) for side in SIDES}
    if not all(known.values()):
        bench.ending.refuse()

    def ask(side: str) -> dict[str, Any]:
        return known[side] or _judged(side, comparison.releases[side], bench)

    with ThreadPoolExecutor(len(SIDES)) as threads:
        published = dict(zip(SIDES, threads.map(ask, SIDES), strict=True))
    before, after = (
        {each["name"]: each for each in published[side].get("calls", ())} for side in SIDES
    )
    comparison = replace(comparison, published=published)
    where = f"--device {bench.plan.device} --seed {bench.plan.seed}"
    commands = {
        side: f"kernelproof published {shlex.quote(release.shared)} {where}"
        for side, release in comparison.releases.items()
        if not release.interpreter  # which the command does not take
    }
    waiting = _not_asked(published[BASELINE], after)
    comparison = comparison.with_findings(differences(before, after, chips, commands, waiting))
    left = {
        f"{TITLE} of {comparison.name(side)}": _left(published[side], others)
        for side, others in zip(SIDES, ({}, before), strict=True)
    }
    return comparison.skipping({what: why for what, why in left.items() if why}).timed(
        TITLE, started
    )


def _question(side: str) -> dict[str, Any]:
    return {"side": side, "published": SHARE}


def _judged(side: str, release: Release, bench: Bench) -> dict[str, Any]:
    """Judge a release's calls, and keep what is found unless a later run is to ask again."""
    plan, whole = bench.plan, bench.ending
    share = SHARE * whole.seconds if whole.seconds < math.inf else math.inf
    ending = Ending(min(share, whole.seconds_until(1.0)))
    asked = Asked(plan.device, plan.seed, 0, SECONDS, ending, known=bool(plan.ledger.entries))
    environment = limited_to(compilers() // plan.threads)
    with whole.closing(partial(ending.end, TIME)):
        found = judge_part(
            asked,
            lambda size: release.workers(
                plan.device, size=size, environment=environment, handler=HANDLER
            ),
            plan.jobs,
            lambda _: None,
        )
    # At its end calls are cut short or not begun; a release that cannot be read now may be later.
    if not ending.over and found["state"] != FAILED:
        bench.journal.keep_or_stop(_question(side), found, bench.progress.tell)
    return found


def _left(published: Mapping[str, Any], others: Mapping[str, Call]) -> str:
    """Return what of a release's published calls was not judged, and why; empty if nothing.

    Args:
        published: what became of the release's calls.
        others: the baseline's calls by name, where the release is the candidate.
    """
    if "summary" not in published:
        return str(published["why"])
    calls, begun = published["calls"], published["not begun"]
    names = {each["name"] for each in calls}
    crowded = [each for each in calls if _lacks_memory(each)]
    ended = [each for each in calls if each["state"] == "ended" and not each["findings"]]
    left = {
        "modules not compiled": list(published["not compiled"]),
        "not begun": begun,
        "without memory": [each["name"] for each in crowded],
        "ended": [f"{each['name']} ({each['why']})" for each in ended if each not in crowded],
        "no longer published": sorted(others.keys() - names - {*begun}),
    }
    return "; ".join(f"{what}: {', '.join(each)}" for what, each in left.items() if each)


def _lacks_memory(call: Call) -> bool:
    """Whether others held the memory that a call needed."""
    return NO_MEMORY in call["why"]


def _not_asked(published: Mapping[str, Any], others: Iterable[str]) -> Collection[str]:
    """Return the calls that a release publishes, and of which nothing was found.

    Args:
        published: what became of the release's calls.
        others: calls that another release publishes: so may one that could not be read.
    """
    if "summary" in published:
        begun: list[str] = published["not begun"]
        return begun
    return () if published["state"] == UNSUPPORTED else tuple(others)


def differences(
    before: Mapping[str, Call],
    after: Mapping[str, Call],
    chips: tuple[Chip, ...],
    commands: Mapping[str, str],
    waiting: Collection[str] = (),
) -> Iterator[Finding]:
    """Yield what the calls of a candidate do otherwise than those of the baseline, by call and law.

    Args:
        before: the baseline's calls by name.
        after: the candidate's.
        chips: the chips on which it holds.
        commands: the command, by side, that judges a call again, without its name.
        waiting: further calls that the baseline publishes, and that were not asked.
    """
    for name in sorted({*before, *after}):
        one, two = before.get(name), after.get(name)
        for change, each in _changes(one, two, published=name in before or name in waiting):
            law, known = each["law"], each["known"]
            yield finding(
                change,
                f"published/{name}",
                f"{name}: {law}: {each['why']}",
                detail=f"{law}/known" if known else law,
                chips=chips,
                laws=(law,),
                replay={side: f"{command} {name}" for side, command in commands.items()},
                problem={"told": str(each["axes"])} if each["axes"] else None,
                entry=KNOWN if known and change != "new-failure" else "",
                reason=known,
            )
        if (
            one
            and two
            and one["state"] == "judged"
            and two["state"] in ("reference only", "unasked")
            and not _lacks_memory(two)
        ):
            yield finding(
                "implementation-lost",
                f"published/{name}",
                f"{name}: the candidate's own function does not answer: {two['why']}",
                chips=chips,
            )


def _changes(
    one: Call | None, two: Call | None, *, published: bool
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the changes that a call shows, each with its finding.

    Findings that are known and others are compared apart: neither hides the other.

    Args:
        one: what was found of the baseline's call.
        two: what was found of the candidate's.
        published: whether the baseline publishes the call.
    """
    olds, news = ([_failing(call, known=known) for known in (False, True)] for call in (one, two))
    for law in dict.fromkeys(law for each in (*news, *olds) for law in each):
        old, new = ([each[law] for each in group if law in each] for group in (olds, news))
        for each in new:
            # A known failure is none of the candidate's where the baseline breaks the law at all.
            stays = [was for was in old if each["known"] or not was["known"]]
            yield _change(one, law, stays=bool(stays), published=published), each
        if old and not new and _passes(two, law):
            yield "fixed", old[0]


def _failing(call: Call | None, *, known: bool) -> dict[str, Mapping[str, Any]]:
    """Return a call's first finding under each law that it breaks, of known ones or of others."""
    broken = broken_laws({"calls": [call] if call else []}, known=known)
    return {each["law"]: each for each, _ in broken}


def _change(one: Call | None, law: str, *, stays: bool, published: bool) -> str:
    """Return the change that the breach of a law shows.

    Args:
        one: what was found of the baseline's call.
        law: the law that the candidate's breaks.
        stays: whether the baseline's does too.
        published: whether the baseline publishes the call.
    """
    hangs = law == "hangs"
    if stays:
        return "hang-stays" if hangs else "still-failing"
    if hangs and published:
        return "hang"
    return "new-failure" if _passes(one, law) else "candidate-only-failure"


def _passes(call: Call | None, law: str) -> bool:
    """Whether a call was judged by a law."""
    if call is None:
        return False
    if law == REFERENCE:
        return call["state"] in ("judged", "reference only")
    return call["state"] == "judged" and (law in call["laws"] or law in ("hangs", "crashes"))


def counts_told(published: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield each side whose published calls were asked, and their counts in words."""
    for side in SIDES:
        if told := sentence(published.get(side, {})):
            yield side, told.removeprefix(f"{TITLE}: ")
