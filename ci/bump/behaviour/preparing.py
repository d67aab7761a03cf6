"""Learning what there is to compare: surveys, modules, and what is said of it at the start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

from ....impl.registry import resolve_name
from ....properties.search.building import compilers
from ....properties.verdicts.text import count_of
from ...console.errors import MACHINE, USAGE
from ..sides.ending import JUDGED, EndedError, Ending
from ..sides.journal import Journal
from ..sides.plan import Plan
from ..sides.releases import SIDES
from .building import Wanted, choose_modules, ordered_builds
from .comparison import Compared, Sides, survey_both
from .comparison_state import Learned
from .judging import Ready, planned
from .unjudged import DEAR, UNREACHED, build_cost, last_line, refuse_laws
from .watching import Progress


def prepare(
    learned: Learned,
    sides: Sides,
    journal: Journal,
    plan: Plan,
    progress: Progress,
    ending: Ending,
    *,
    threads: int,
    ready: Ready,
) -> list[Wanted]:
    """Survey all implementations, and return the modules that they need.

    Args:
        learned: ``compared`` is filled.
        sides: workers that are asked.
        journal: of the run.
        plan: of it.
        progress: says what is done.
        ending: of the comparison.
        threads: that ask.
        ready: takes each implementation once its problems can be drawn: at once where it needs no
            module.
    """
    _survey(learned, sides, plan, progress, threads, ready)
    _fail_unimported(learned, plan)
    refuse_laws(learned.compared, plan.laws)
    building = [each for each in learned.compared if each.runs and each.build_minutes]
    if building:
        progress.tell("choosing modules for all implementations together")
    wanted: list[Wanted] = []
    try:
        wanted = choose_modules(building, sides, journal, plan, ending)
    except EndedError:
        for each in building:
            each.left_out = UNREACHED
    for each in building:
        each.planned = planned(each, plan)
        if not each.left_out:
            ready(each)
    for line in announced(learned.compared, wanted, ending):
        progress.tell(line)
    return wanted


def _survey(
    learned: Learned, sides: Sides, plan: Plan, progress: Progress, threads: int, ready: Ready
) -> None:
    """Learn what each implementation supports."""
    known: dict[str, Compared] = {}

    def survey(name: str) -> None:
        try:
            found = survey_both(name, resolve_name(name), sides, plan)
        except EndedError:
            found = Compared(name, resolve_name(name), left_out=UNREACHED)
        finally:
            progress.surveyed.add()
        known[name] = found
        if found.runs and not found.build_minutes:
            ready(found)

    progress.tell(
        "asking what each implementation supports; what needs no module is judged at once"
    )
    progress.surveyed.expect(len(plan.implementations))
    with ThreadPoolExecutor(threads) as asking:
        try:
            list(asking.map(survey, plan.implementations))
        except BaseException:
            for side in sides.values():  # what other threads still ask for is not waited for
                side.close()
            raise
        finally:
            learned.compared = [known[name] for name in plan.implementations if name in known]


def _fail_unimported(learned: Learned, plan: Plan) -> None:
    """Fail for implementations that cannot be imported."""
    for each in learned.compared:
        # With both it is nothing of a release: who named it named what there is not.
        code = USAGE if plan.named and len(each.errors) == len(SIDES) else MACHINE
        for side, why in each.errors.items():
            if side in each.unimported:
                message = f"{each.name} with {learned.given[side]}: {last_line(why)}"
                learned.fail(message, code)


def announced(
    compared: Sequence[Compared], wanted: Sequence[Wanted], ending: Ending
) -> Iterator[str]:
    """Return sentences: what will be built and judged, what will not, and until when."""
    judged = [each for each in compared if each.runs and not each.left_out]
    ahead = {each.found.name for each in wanted}
    yield (
        f"{len(judged)} of {len(compared)} implementations will be judged: "
        f"{len(judged) - len(ahead)} need no module"
        + (f", {len(ahead)} need {count_of(len(wanted), 'module')} of each release" * bool(ahead))
    )
    if wanted:
        builds = [each for each in ordered_builds(wanted) if not each.exists]
        minutes = sum(each.wanted[0].found.build_minutes for each in builds)
        yield (
            f"{count_of(len(builds), 'compilation')} of them, about {minutes / compilers():.0f} "
            f"minutes of "
            f"{count_of(compilers(), 'compiler')}, and less where a cache has them; the first "
            "module of each implementation comes first"
        )
    for each in compared:
        if each.build_minutes and each.left_out and each.left_out != UNREACHED:
            why = "" if each.left_out == DEAR else ", for which others leave no time"
            cost = build_cost(each.build_minutes, each.build_compilers)
            yield f"not built, and not judged: {each.name}: {cost}{why}"
    problems = sum(sum(each.planned.values()) for each in judged)
    yield f"about {problems:,} problems will be judged with both releases, {_until(ending)}"


def _until(ending: Ending) -> str:
    if ending.minutes is None:
        return "without a limit of time (--minutes sets one)"
    now = datetime.now().astimezone()
    judged, end = (
        (now + timedelta(seconds=max(0.0, ending.seconds_until(share)))).strftime("%H:%M:%S")
        for share in (JUDGED, 1.0)
    )
    return f"until {judged}; the report comes by {end} (--minutes {ending.minutes:g})"
