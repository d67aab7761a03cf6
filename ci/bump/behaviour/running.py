"""The run of a comparison: releases, declarations, behaviour, speed; whatever fails is reported."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click

from ....impl.flashinfer_declarations import DeclarationsError, declarations
from ....impl.targets.target import Target
from ....properties.isolation.outcome import describe_exit
from ....properties.isolation.workers import Deadlines
from ....properties.verdicts.text import count_of
from ....properties.worker.requests import DeviceLostError, HarnessError
from ...console.errors import INCOMPLETE, MACHINE, MachineError, UsageRefusedError
from ...releases.packages import BEHAVIOUR, DECLARED, SPEED, SURFACE
from ...releases.sandboxes import Tell
from ...releases.subprocess_runner import run_to_end
from ..sides.ending import EXAMINED, JUDGED, EndedError, Ending
from ..sides.journal import Journal
from ..sides.plan import Plan
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
from .asking import Side
from .building import Builders
from .comparison import Compared, Tried
from .comparison_state import Learned
from .compiled import Compilation, compile_both, compile_findings
from .judging import Judging
from .outcomes import FIXED, Context, behaviour_findings, change_of, entry_of
from .preparing import prepare
from .speed import measure, memory_findings, speed_findings
from .unjudged import cuts_of, gap, last_line, nothing_judged
from .watching import Progress

DECLARATION_SECONDS = 180.0
"""Most seconds of importing and reading a release, which takes 5 to 13 s on an idle machine."""
IMPORT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); __import__(sys.argv[2])"
OVER = "the time for it was over"


def find_both(learned: Learned, ending: Ending, tell: Tell) -> None:
    """Find both releases; one that cannot be had is a failure, and the other is read."""

    def find(side: str) -> Release | click.ClickException:
        try:
            return find_release(learned.given[side], learned.package, tell=tell)
        except click.ClickException as error:
            ending.check()
            return error

    with learned.timed("releases"), ThreadPoolExecutor(len(SIDES)) as threads:
        for side, found in zip(SIDES, threads.map(find, SIDES), strict=True):
            if isinstance(found, Release):
                learned.releases[side] = found
            else:
                learned.fail(f"--{side}: {found.message}", found.exit_code)


def read_declarations(learned: Learned, journal: Journal, parts: Sequence[str], tell: Tell) -> None:
    """Collect what each release declares, both at a time, where a part needs it."""
    declares = DECLARED in learned.package.parts

    def collect(side: str) -> dict[str, Any]:
        tell(f"{learned.given[side]}: reading what it declares")
        return (_declarations if declares else _callables)(learned.releases[side])

    def ask(side: str) -> dict[str, Any]:
        found: dict[str, Any] = journal.ask({"declarations": side}, lambda: collect(side))
        return found

    found_sides = [side for side in SIDES if side in learned.releases]
    if declares and not {SURFACE, DECLARED} & set(parts):
        return
    with learned.timed(DECLARED), ThreadPoolExecutor(len(SIDES)) as threads:
        answers = list(threads.map(ask, found_sides))
        tell("read what they declare")
        for side, found in zip(found_sides, answers, strict=True):
            if "error" not in found:
                learned.declared[side] = found
            elif side == CANDIDATE and not found.get("dependencies"):
                learned.findings.append(
                    finding(
                        "release-broken",
                        learned.given[side],
                        found["error"],
                        rule=f"stay with {learned.given[BASELINE]}",
                    )
                )
            else:
                learned.fail(f"--{side}: {found['error']}")


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


def compare_declarations(learned: Learned, parts: Sequence[str]) -> None:
    """Compare what both releases declare, where both do."""
    if not {SURFACE, DECLARED} & {*parts} & {*learned.package.parts}:
        return
    if set(learned.declared) != set(SIDES):
        why = "one of the releases could not be read"
        learned.skipped |= {part: why for part in (SURFACE, DECLARED) if part in parts}
        return
    before, after = (learned.declared[side] for side in SIDES)
    declares = DECLARED in learned.package.parts
    if SURFACE in parts and not declares and not before["signatures"] | after["signatures"]:
        learned.skipped[SURFACE] = "adapters use no name that one of the releases has"
    elif SURFACE in parts:
        compare = surface_findings if declares else called_findings
        learned.findings += compare(before, after)
    if DECLARED in parts and declares:
        learned.findings += declared_findings(before, after, learned.chips)
        made = matrices(before, after, learned.chips)
        learned.findings += support_findings(made)
        learned.findings += known_hangs(before, after, learned.chips)
        learned.features = features(made, learned.chips)


def read_uses(learned: Learned, sources: Sequence[Source], ending: Ending, tell: Tell) -> None:
    """Look for what changed in engines' sources, while nothing else is lost by an end."""
    if sources:
        tell(f"looking for what changed in {', '.join(str(each.path) for each in sources)}")
        with learned.timed("uses"):
            found, learned.engines = with_uses(learned.findings, sources, ending.refuse)
        learned.findings = found


def compare_compiled(learned: Learned, asked: Compilation, journal: Journal, tell: Tell) -> None:
    """Compile both releases' modules for chips that were asked for."""
    if set(learned.releases) != set(SIDES):
        learned.skipped["compile"] = "one of the releases could not be had"
        return
    try:
        with learned.timed("compile"):
            learned.compiled = compile_both(asked, learned.releases, journal, tell)
        learned.findings += compile_findings(learned.compiled)
    except click.ClickException as error:
        flag = "" if isinstance(error, UsageRefusedError) else "--compile: "  # which names its own
        learned.fail(f"{flag}{error.message}", error.exit_code)


def compare_behaviour(
    learned: Learned,
    journal: Journal,
    plan: Plan,
    chips: tuple[Chip, ...],
    limit: float,
    progress: Progress,
    ending: Ending,
    *,
    speed: bool = True,
) -> None:
    """Run the same problems through both releases.

    Args:
        learned: is filled.
        journal: of the run.
        plan: of it.
        chips: on which what is found holds.
        limit: ratio of seconds that counts as slower.
        progress: says what is done.
        ending: of the comparison, which may come at any moment.
        speed: whether calls are timed too.
    """
    had = learned.declared if learned.declared or learned.failures else learned.releases
    missing = [side for side in SIDES if side not in had]
    if missing:
        why = f"{learned.given[missing[0]]} does not import or could not be had"
        learned.skipped |= {BEHAVIOUR: why, SPEED: why}
        return
    with ExitStack() as stack:
        sides = {
            side: Side(
                side,
                journal,
                partial(
                    learned.releases[side].workers,
                    plan.device,
                    size=plan.jobs,
                    standby=plan.device == "cuda",  # importing FlashInfer takes seconds there
                ),
                plan.device,
            )
            for side in SIDES
        }
        for side in sides.values():
            stack.callback(side.close)
            stack.enter_context(ending.closing(side.close))
        try:
            with learned.timed(BEHAVIOUR):
                ending.allot(JUDGED)
                progress.tell("starting workers with both releases")
                _targets(learned, sides, plan)
                _judge(learned, sides, journal, plan, progress, ending)
                ending.allot(EXAMINED)
                progress.tell("running failures again, and making them small")
                context = Context(
                    sides,
                    plan,
                    learned.releases,
                    learned.targets,
                    chips,
                    learned.unwritten,
                    progress.examined,
                )
                learned.findings += behaviour_findings(learned.compared, context)
                _other_inputs(learned)
                _lost(learned)
                _left_out(learned, ending, context)
            if speed:
                ending.allot(1.0)
                with learned.timed(SPEED):
                    _measure(learned, sides, progress)
                learned.findings += speed_findings(learned.compared, limit, chips)
                learned.findings += memory_findings(learned.compared, chips)
        except (HarnessError, DeviceLostError) as error:
            learned.fail(f"the comparison of behaviour ended early: {error}")


def _targets(learned: Learned, sides: Mapping[str, Side], plan: Plan) -> None:
    """Learn what machine, torch, Triton and other providers each side runs on."""
    of_ledger = (name for entry in plan.ledger.entries for name in entry.versions)
    providers = sorted({*of_ledger, learned.package.distribution})
    request = {"task": "target", "device": plan.device, "providers": providers}

    def ask(side: str) -> dict[str, Any]:
        outcome = sides[side].ask(request, Deadlines())
        if outcome.status != "done" or "error" in (outcome.result or {}):
            why = (outcome.result or {}).get("error") or outcome.detail or outcome.kind
            message = f"the workers of {learned.given[side]} do not start: {last_line(str(why))}"
            raise HarnessError(message)
        return outcome.result or {}

    with ThreadPoolExecutor(len(SIDES)) as threads:
        for side, found in zip(SIDES, threads.map(ask, SIDES), strict=True):
            found["artifacts"] = tuple(tuple(pair) for pair in found.get("artifacts", ()))
            version = learned.declared.get(side, {}).get("flashinfer") or found.get("flashinfer")
            learned.targets[side] = Target(**{**found, "flashinfer": version})


def _judge(
    learned: Learned,
    sides: dict[str, Side],
    journal: Journal,
    plan: Plan,
    progress: Progress,
    ending: Ending,
) -> None:
    """Judge while implementations are surveyed and their modules built."""
    builders = Builders(learned.releases, journal, plan, ending)
    # A GPU is not to wait for surveys; on a CPU more processes would only share the cores.
    apart = plan.device == "cuda"
    threads = len(SIDES) * (builders.at_a_time if apart else plan.jobs)
    surveyors = builders.sides if apart else sides
    try:
        with builders.opened():
            Judging(sides, builders, plan, ending, progress, _seen(learned, plan, progress)).run(
                lambda ready: prepare(
                    learned,
                    surveyors,
                    journal,
                    plan,
                    progress,
                    ending,
                    threads=threads,
                    ready=ready,
                )
            )
    except (HarnessError, DeviceLostError, MachineError) as error:  # what was learned stays
        ending.end(f"the comparison of behaviour ended early: {error}", MACHINE)


def _seen(learned: Learned, plan: Plan, progress: Progress) -> Callable[[Tried, Compared], None]:
    """Return what shows failures that nothing explains, the first of each kind, as they come."""
    shown: set[tuple[str, str]] = set()

    def see(tried: Tried, found: Compared) -> None:
        change = change_of(tried, found)
        if change in ("", FIXED) or (change, found.name) in shown:
            return
        if entry_of(tried, change, found, plan, learned.targets) is None:
            shown.add((change, found.name))
            verdict = tried.verdicts[CANDIDATE]
            what = f"{verdict.status} {verdict.kind}".strip()
            progress.found(f"{change}  {found.name}  {tried.law}: {what}: {verdict.message}")

    return see


def _measure(learned: Learned, sides: dict[str, Side], progress: Progress) -> None:
    """Time what there is time for; the rest is named."""
    both = [each for each in learned.compared if each.runs == SIDES]
    progress.tell("timing the same calls with both releases")
    progress.timed.expect(len(both))
    untimed: list[str] = []
    for each in both:
        try:
            measure(each, sides)
        except EndedError:
            untimed.append(each.name)
        progress.timed.add()
    if untimed:
        why = f"{OVER}: {', '.join(untimed)}"
        learned.skipped[f"speed of {count_of(len(untimed), 'implementation')}"] = why


def _left_out(learned: Learned, ending: Ending, context: Context) -> None:
    """Add what was not judged, or not run again, and fail where a verdict needs it."""
    learned.cuts = cuts_of(learned.compared, ending)
    lacking = "" if ending.code else gap(learned.cuts, ending)
    if lacking:
        learned.fail(lacking, INCOMPLETE)
    unsettled = sorted(context.unsettled)
    if unsettled and not ending.code:
        names = ", ".join(dict.fromkeys(unsettled))
        learned.fail(f"{OVER} before every failure was seen again: {names}", INCOMPLETE)
    unjudged = nothing_judged(learned.compared)
    if unjudged and not learned.failures and not ending.code:  # which say why
        learned.fail(unjudged)


def _other_inputs(learned: Learned) -> None:
    """Fail where the inputs were not the same bits: such a comparison proves nothing."""
    for each in learned.compared:
        other = sum(tried.same_inputs is False for tried in each.tried)
        if other:
            learned.fail(f"{each.name}: the two sides made other inputs for {other} problems")


def _lost(learned: Learned) -> None:
    """Add implementations that could not be judged, through no fault of theirs."""
    for each in learned.compared:
        lost = [
            verdict.message
            for tried in each.tried
            for verdict in tried.verdicts.values()
            if verdict.status == "LOST"
        ]
        if not lost:
            continue
        why = f"{len(lost)} answers could not be had: {last_line(lost[0])}"
        if any(tried.judged(side) for tried in each.tried for side in each.runs):
            learned.skipped[each.name] = why
        else:
            learned.fail(f"{each.name}: {why}")
