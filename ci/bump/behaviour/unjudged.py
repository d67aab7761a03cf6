"""What a comparison of behaviour cannot have judged: then it says nothing of a bump."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ....properties.laws import find_law
from ....properties.search.building import compilers
from ....properties.verdicts.text import count_of
from ...console.errors import MACHINE, UsageRefusedError
from ..sides.ending import Ending
from ..sides.releases import CANDIDATE
from .comparison import Compared

TIME, SIGNAL, LOST = "time", "signal", "lost"
"""Why a comparison ended: its time, a signal, or a device or a suite that failed."""
DEAR, UNREACHED = "dear", "unreached"
"""Why all of an implementation was left out, besides ``TIME``, where the modules of others took
all of it: one of its modules takes longer than compilers may run, or the end came before it was
asked what it supports."""
MOST_NAMED = 3
"""Most implementations that a verdict names which had too little time; it counts the others."""


def build_cost(minutes: float, most: int) -> str:
    """Return a clause: what compiling a module costs.

    Args:
        minutes: of one core.
        most: cores that it keeps busy.
    """
    busy = min(most, compilers())
    each = math.ceil(minutes / busy)
    return f"one module takes about {count_of(each, 'minute')} of {count_of(busy, 'compiler')}"


def last_line(text: str) -> str:
    """Return the last line of a text, which in a traceback is the error."""
    return (text.strip().splitlines() or [""])[-1]


def refuse_laws(compared: Sequence[Compared], laws: Sequence[str]) -> None:
    """Refuse a law that speaks of no operation of what is compared.

    Raises:
        UsageRefusedError: names it.
    """
    operations = {each.operation for each in compared}
    if not operations or "" in operations:  # what does not import may be of any
        return
    for name in laws:
        spoken = find_law(name).operations
        if operations.isdisjoint(spoken):
            message = (
                f"--law {name}: speaks of {', '.join(sorted(spoken))}; what is compared is "
                f"{', '.join(sorted(operations))}"
            )
            raise UsageRefusedError(message)


def nothing_judged(compared: Sequence[Compared]) -> str:
    """Return why no problem was judged with the candidate; empty where one was."""
    if any(tried.judged(CANDIDATE) for each in compared for tried in each.tried):
        return ""
    reasons = (
        each.errors.get(CANDIDATE) or each.reasons.get(CANDIDATE) or _of_problems(each)
        for each in compared
    )
    reason = next(filter(None, reasons), "there was none to judge")
    return f"no problem was judged with the candidate: {last_line(reason)}"


def _of_problems(found: Compared) -> str:
    """Return what the candidate said instead, of the first problem that was tried."""
    for tried in found.tried:
        verdict = tried.verdicts.get(CANDIDATE)
        if verdict is not None:
            return verdict.message or "no law had anything to judge"
    return ""


@dataclass(frozen=True)
class Cut:
    """What the end of a comparison left out of an implementation.

    Attributes:
        name: of the implementation.
        code: ``TIME``, ``SIGNAL``, ``LOST``, ``DEAR`` or ``UNREACHED``.
        problems: that were to be judged, about.
        judged: of them.
        modules: that were to be built for each side.
        built: of them, for all sides.
        laws: that judged none of their problems.
        minutes: of one core that compiling one of its modules takes, roughly; 0 if it has none.
        compilers: that one of them keeps busy.
    """

    name: str
    code: str
    problems: int
    judged: int
    modules: int
    built: int
    laws: tuple[str, ...]
    minutes: float = 0.0
    compilers: int = 1

    @property
    def matters(self) -> bool:
        """Whether a verdict needs what was left out: something of which nothing is known."""
        return self.code != DEAR and (self.code == UNREACHED or bool(self.laws))


def cuts_of(compared: Sequence[Compared], ending: Ending) -> list[Cut]:
    """Return what was left out, by implementation."""
    ended = {0: TIME, MACHINE: LOST}.get(ending.code, SIGNAL)
    found = []
    for each in compared:
        code = each.left_out or ended
        seen = {tried.law for tried in each.tried if tried.case is None}
        built = min((len(each.builds.get(side, ())) for side in each.runs), default=0)
        problems = sum(each.planned.values())
        if problems > len(each.tried) or each.left_out:
            laws = [law for law, count in each.planned.items() if law and count and law not in seen]
            judged = len(each.tried)
            found.append(
                Cut(
                    each.name, code, problems, judged, each.modules, built, tuple(laws),
                    each.build_minutes, each.build_compilers,
                )
            )  # fmt: skip
    return found


def rows_of(cuts: Sequence[Cut], ending: Ending) -> Iterator[dict[str, Any]]:
    """Return rows of what was not tested: what was left out, with names and counts, and why."""
    for each in cuts:
        if each.code == DEAR:
            cost = build_cost(each.minutes, each.compilers)
            within = f"--minutes {ending.minutes:g}"
            why = f"{cost}, and both releases' must be compiled within {within}"
            yield {"what": f"{each.name}: its modules", "why": why}
    others = [each for each in cuts if each.code != DEAR]
    unasked = [each.name for each in others if each.code == UNREACHED]
    short = [each for each in others if each.code != UNREACHED and each.problems > each.judged]
    unbuilt = [each for each in others if each.modules > each.built]
    why = ending.why or f"the time for it was over (--minutes {ending.minutes or 0:g})"
    if unasked:
        yield {
            "what": f"{count_of(len(unasked), 'implementation')}: {', '.join(unasked)}",
            "why": why,
            "implementations": unasked,
        }
    for what, found in (
        ("problem", [(each.name, each.problems - each.judged, each.problems) for each in short]),
        ("module", [(each.name, each.modules - each.built, each.modules) for each in unbuilt]),
    ):
        if found:
            parts = ", ".join(f"{name} ({cut} of {of})" for name, cut, of in found)
            total = sum(cut for _, cut, _ in found)
            of_all = sum(of for _, _, of in found)
            yield {"what": f"{total:,} of about {of_all:,} {what}s: {parts}", "why": why}


def gap(cuts: Sequence[Cut], ending: Ending) -> str:
    """Return what a verdict lacks because the time was over; empty where it lacks nothing."""
    lacking = [each.name for each in cuts if each.matters]
    if not lacking:
        return ""
    minutes = f"--minutes {ending.minutes or 0:g}"
    # It stands in the first line of a report, and rows of what was not tested name them all.
    more = f" and {len(lacking) - MOST_NAMED} more" if len(lacking) > MOST_NAMED else ""
    return (
        f"the time was over ({minutes}) before every law had judged a problem of "
        f"{count_of(len(lacking), 'implementation')}: {', '.join(lacking[:MOST_NAMED])}{more}; "
        "--resume goes on from here"
    )
