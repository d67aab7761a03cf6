"""The steps of a comparison: each makes of the record before it the next one.

Releases are found, their declarations compared, engines' sources read, modules compiled, problems
judged, failures examined, calls timed. What fails is in the record too.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ....impl.flashinfer_declarations import DeclarationsError, declarations
from ....impl.targets.target import Target
from ....properties.isolation.outcome import describe_exit
from ....properties.isolation.workers import Deadlines
from ....properties.search.ending import EndedError, Ending
from ....properties.verdicts.text import count_of
from ....properties.worker.requests import DeviceLostError, HarnessError
from ...answers.journal import Journal
from ...console.errors import INCOMPLETE, MACHINE, USAGE
from ...releases.packages import BEHAVIOUR, DECLARED, SPEED, SURFACE
from ...releases.sandboxes import Tell
from ...releases.subprocess_runner import run_to_end
from ..sides.plan import EXAMINED, JUDGED, BumpPlan, end_of
from ..sides.releases import BASELINE, CANDIDATE, SIDES, Release, find_release
from ..surface.callables import callables_of, used_of
from ..surface.comparison import called_findings, surface_findings
from ..surface.declared import (
    declared_findings,
    features,
    known_hangs,
    matrices,
    support_findings,
)
from ..surface.uses import Source, with_uses
from ..verdicts.findings import Chip, finding
from .asking import Bench
from .building import Builders
from .judging import Judging, Seen
from .numbers import cuts_of, gap, last_line, nothing_judged
from .outcomes import FIXED, Context, Examined, change_of, entry_of, examine
from .records import LOST, Compared, Comparison, Planned, Tried
from .speed import measure, memory_findings, speed_findings

DECLARATION_SECONDS = 180.0
"""Most seconds of importing and reading a release, which takes 5 to 13 s on an idle machine."""
IMPORT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); __import__(sys.argv[2])"
OVER = "the time for it was over"


def find_both(comparison: Comparison, ending: Ending, tell: Tell, cpu: str = "") -> Comparison:
    """Find both releases; one that cannot be had is a failure, and the other is read."""
    started = time.monotonic()

    def find(side: str) -> Release | click.ClickException:
        try:
            return find_release(comparison.given[side], comparison.package, cpu=cpu, tell=tell)
        except click.ClickException as error:
            ending.check()
            return error

    with ThreadPoolExecutor(len(SIDES)) as threads:
        found = dict(zip(SIDES, threads.map(find, SIDES), strict=True))
    releases = {side: each for side, each in found.items() if isinstance(each, Release)}
    comparison = replace(comparison, releases=releases)
    for side, each in found.items():
        if isinstance(each, click.ClickException):
            comparison = comparison.failing(f"--{side}: {each.message}", each.exit_code)
    return comparison.timed("releases", started)


def read_declarations(
    comparison: Comparison, journal: Journal, parts: Sequence[str], tell: Tell
) -> Comparison:
    """Collect what each release declares, both at a time, where a part needs it."""
    declares = DECLARED in comparison.package.parts
    if declares and not {SURFACE, DECLARED} & set(parts):
        return comparison
    started = time.monotonic()

    def ask(side: str) -> dict[str, Any]:
        release = comparison.releases[side]

        def collect() -> dict[str, Any]:
            tell(f"{comparison.given[side]}: reading what it declares")
            return (_declarations if declares else _callables)(release)

        found: dict[str, Any] = journal.ask({"declarations": side}, collect)
        return found

    with ThreadPoolExecutor(len(SIDES)) as threads:
        answers = dict(zip(comparison.releases, threads.map(ask, comparison.releases), strict=True))
    tell("read what they declare")
    known = {side: each for side, each in answers.items() if "error" not in each}
    comparison = replace(comparison, declared=known)
    for side, each in answers.items():
        if side in known:
            continue
        if side == CANDIDATE and not each.get("dependencies"):
            given, stay = comparison.given[side], f"stay with {comparison.given[BASELINE]}"
            broken = finding("release-broken", given, each["error"], rule=stay)
            comparison = comparison.with_findings([broken])
        else:
            comparison = comparison.failing(f"--{side}: {each['error']}")
    return comparison.timed(DECLARED, started)


def _declarations(release: Release) -> dict[str, Any]:
    """Return what a release of FlashInfer declares, or ``error``."""
    own: dict[str, Any] = {}
    if release.own_environment:  # its packages are made for its interpreter, not for this
        own = {"executable": release.executable, "sys_path": release.path}
    try:
        return declarations(release.folder, deadline=DECLARATION_SECONDS, **own)
    except DeclarationsError as error:
        return {"error": str(error).replace(str(release.folder), release.given)}


def _callables(release: Release) -> dict[str, Any]:
    """Return what adapters call of a release of another package, or ``error``."""
    package = release.package
    if error := _unimported(release):
        if package.stands_alone or release.own_environment:
            return {"error": error}
        hint = "its dependencies may be missing: give a Python interpreter that has them too"
        return {"error": f"{error} ({hint})", "dependencies": True}
    used = used_of(package.module) if SURFACE in package.parts else ()
    return {"signatures": callables_of(release.folder, used)}


def _unimported(release: Release) -> str:
    """Return why a release cannot be imported; empty if it can, or if nothing imports it whole."""
    package = release.package
    if package.sources:
        return ""
    words = [release.executable, "-c", IMPORT, json.dumps(release.path), package.module]
    with tempfile.TemporaryDirectory(prefix="kernelproof-") as scratch:
        ended = run_to_end(words, folder=Path(scratch), deadline=DECLARATION_SECONDS)
    if ended.status == 0 and not ended.cut_short:
        return ""
    why = ended.cut_short or last_line(ended.told) or describe_exit(ended.status or 0)
    return f"{release.given}: {package.module} cannot be imported: {why}"


def compare_declarations(comparison: Comparison, parts: Sequence[str]) -> Comparison:
    """Compare what both releases declare, where both do."""
    package, chips = comparison.package, comparison.chips
    if not {SURFACE, DECLARED} & {*parts} & {*package.parts}:
        return comparison
    if set(comparison.declared) != set(SIDES):
        why = "one of the releases could not be read"
        return comparison.skipping({part: why for part in (SURFACE, DECLARED) if part in parts})
    before, after = (comparison.declared[side] for side in SIDES)
    declares = DECLARED in package.parts
    if SURFACE in parts and not declares and not before["signatures"] | after["signatures"]:
        why = "adapters use no name that one of the releases has"
        comparison = comparison.skipping({SURFACE: why})
    elif SURFACE in parts:
        compare = surface_findings if declares else called_findings
        comparison = comparison.with_findings(compare(before, after))
    if DECLARED not in parts or not declares:
        return comparison
    made = matrices(before, after, chips)
    comparison = comparison.with_findings(
        declared_findings(before, after, chips),
        support_findings(made),
        known_hangs(before, after, chips),
    )
    return replace(comparison, features=features(made, chips))


def read_uses(
    comparison: Comparison, sources: Sequence[Source], ending: Ending, tell: Tell
) -> Comparison:
    """Look for what changed in engines' sources, while nothing else is lost by an end."""
    if not sources:
        return comparison
    started = time.monotonic()
    tell(f"looking for what changed in {', '.join(str(each.path) for each in sources)}")
    findings, engines = with_uses(comparison.findings, sources, ending.refuse)
    return replace(comparison, findings=tuple(findings), engines=engines).timed("uses", started)


def missing_sides(comparison: Comparison) -> list[str]:
    """Return the sides that could not be had or read, whose behaviour nobody can ask about."""
    had = comparison.declared if comparison.declared or comparison.failures else comparison.releases
    return [side for side in SIDES if side not in had]


def compare_behaviour(
    comparison: Comparison, bench: Bench, chips: tuple[Chip, ...], limit: float, *, speed: bool
) -> Iterator[Comparison]:
    """Run the same problems through both releases; yield the record after each step.

    Args:
        comparison: the record so far.
        bench: the bench to ask with, once both releases have workers.
        chips: the chips on which the findings hold.
        limit: ratio of seconds that counts as slower.
        speed: whether calls are timed too.
    """
    if missing := missing_sides(comparison):
        why = f"{comparison.given[missing[0]]} does not import or could not be had"
        yield comparison.skipping({BEHAVIOUR: why, SPEED: why})
        return
    started, ending, progress = time.monotonic(), bench.ending, bench.progress
    # Importing FlashInfer takes seconds on a GPU: one more process stands by there.
    bench = bench.staffed(
        comparison.releases, size=bench.plan.jobs, standby=bench.plan.device == "cuda"
    )
    with ExitStack() as stack:
        stack.callback(bench.close)
        stack.enter_context(ending.closing(bench.close))
        try:
            ending.allot(JUDGED)
            progress.tell("starting workers with both releases")
            comparison = replace(comparison, targets=_targets(comparison, bench))
            context = Context(bench, comparison.releases, comparison.targets, chips)
            builders = Builders(comparison.releases, bench)
            judging = Judging(bench, builders, _seen(context))
            with builders.opened():
                comparison = replace(comparison, compared=judging.run())
            for sentence, code in unimported(comparison, bench.plan):
                comparison = comparison.failing(sentence, code)
            yield comparison
            if judging.error is not None:
                raise judging.error
            ending.allot(EXAMINED)
            progress.tell("running failures again, and making them small")
            examined = examine(comparison.compared, context)
            comparison = _with_examined(comparison, examined, ending).timed(BEHAVIOUR, started)
            yield comparison
            if examined.error is not None:
                raise examined.error
            if speed:
                started = time.monotonic()
                ending.allot(1.0)
                comparison, error = _with_speed(comparison, bench)
                comparison = comparison.timed(SPEED, started).with_findings(
                    speed_findings(comparison.compared, limit, chips),
                    memory_findings(comparison.compared, chips),
                )
                yield comparison
                if error is not None:
                    raise error
        except (HarnessError, DeviceLostError) as error:
            yield comparison.failing(f"the comparison of behaviour ended early: {error}")


def _targets(comparison: Comparison, bench: Bench) -> dict[str, Target]:
    """Learn what machine, torch, Triton and other providers each side runs on."""
    of_ledger = (name for entry in bench.plan.ledger.entries for name in entry.versions)
    providers = sorted({*of_ledger, comparison.package.distribution})
    request = {"task": "target", "device": bench.plan.device, "providers": providers}

    def ask(side: str) -> Target:
        outcome = bench.sides[side].ask(request, Deadlines())
        found = outcome.result or {}
        if outcome.status != "done" or "error" in found:
            why = found.get("error") or outcome.detail or outcome.kind
            given = comparison.given[side]
            message = f"the workers of {given} do not start: {last_line(str(why))}"
            raise HarnessError(message)
        declared = comparison.declared.get(side, {})
        version = declared.get("flashinfer") or found.get("flashinfer")
        artifacts: Any = found.get("artifacts", ())
        pairs = tuple(tuple(pair) for pair in artifacts)
        fields: dict[str, Any] = {**found, "artifacts": pairs, "flashinfer": version}
        return Target(**fields)

    with ThreadPoolExecutor(len(SIDES)) as threads:
        return dict(zip(SIDES, threads.map(ask, SIDES), strict=True))


def _seen(context: Context) -> Seen:
    """Return what shows failures that nothing explains, the first of each kind, as they come."""
    shown: set[tuple[str, str]] = set()

    def see(tried: Tried, found: Planned) -> None:
        change = change_of(tried, found)
        if change in ("", FIXED) or (change, found.name) in shown:
            return
        if entry_of(tried, change, found, context) is None:
            shown.add((change, found.name))
            verdict = tried.verdicts[CANDIDATE]
            what = f"{verdict.status} {verdict.kind}".strip()
            context.bench.progress.found(
                f"{change}  {found.name}  {tried.law}: {what}: {verdict.message}"
            )

    return see


def unimported(comparison: Comparison, plan: BumpPlan) -> Iterator[tuple[str, int]]:
    """Yield a sentence and an exit code for each implementation that cannot be imported."""
    for each in comparison.compared:
        # With both it is nothing of a release: who named it named what there is not.
        code = USAGE if plan.named and len(each.errors) == len(SIDES) else MACHINE
        for side, why in each.errors.items():
            if side in each.unimported:
                yield f"{each.name} with {comparison.given[side]}: {last_line(why)}", code


def _with_examined(comparison: Comparison, examined: Examined, ending: Ending) -> Comparison:
    """Return the record after failures were run again, with what a verdict lacks."""
    comparison = replace(
        comparison, compared=examined.compared, unwritten=examined.unwritten
    ).with_findings(examined.findings)
    if examined.error is not None:
        return comparison
    for each in comparison.compared:
        comparison = _with_unusable(comparison, each)
    cuts = cuts_of(comparison.compared, ending)
    comparison = replace(comparison, cuts=cuts)
    if end_of(ending)[1]:
        return comparison
    if lacking := gap(cuts, ending):
        comparison = comparison.failing(lacking, INCOMPLETE)
    if examined.unsettled:
        names = ", ".join(sorted(examined.unsettled))
        sentence = f"{OVER} before every failure was seen again: {names}"
        comparison = comparison.failing(sentence, INCOMPLETE)
    unjudged = nothing_judged(comparison.compared)
    if unjudged and not comparison.failures:  # which say why
        comparison = comparison.failing(unjudged)
    return comparison


def _with_unusable(comparison: Comparison, found: Compared) -> Comparison:
    """Return the record with answers of an implementation that say nothing of the releases."""
    other = sum(tried.same_inputs is False for tried in found.tried)
    if other:  # such a comparison proves nothing
        sentence = f"{found.name}: the two sides made other inputs for {other} problems"
        comparison = comparison.failing(sentence)
    lost = [
        verdict.message
        for tried in found.tried
        for verdict in tried.verdicts.values()
        if verdict.status == LOST
    ]
    if not lost:
        return comparison
    why = f"{len(lost)} answers could not be had: {last_line(lost[0])}"
    if any(tried.judged(side) for tried in found.tried for side in found.runs):
        return comparison.skipping({found.name: why})
    return comparison.failing(f"{found.name}: {why}")


def _with_speed(comparison: Comparison, bench: Bench) -> tuple[Comparison, Exception | None]:
    """Time what there is time for; the rest is named, or else the error that ended it returned."""
    progress = bench.progress
    progress.tell("timing the same calls with both releases")
    progress.timed.expect(sum(each.runs == SIDES for each in comparison.compared))
    compared: list[Compared] = []
    untimed: list[str] = []
    error: Exception | None = None
    for each in comparison.compared:
        speeds: list[dict[str, Any]] = []
        if each.runs == SIDES and error is None:
            try:
                speeds.extend(measure(each, bench))
            except EndedError:  # what was timed before it stays
                untimed.append(each.name)
            except Exception as early:  # noqa: BLE001  here too, for the report
                error = early
            progress.timed.add()
        compared.append(replace(each, speeds=tuple(speeds)))
    comparison = replace(comparison, compared=tuple(compared))
    if untimed:
        why = f"{OVER}: {', '.join(untimed)}"
        what = f"speed of {count_of(len(untimed), 'implementation')}"
        comparison = comparison.skipping({what: why})
    return comparison, error
