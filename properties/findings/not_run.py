"""Why implementations were not run, counted by the codes of their refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ...impl.targets.refusal import Refusal

Reason = tuple[str, str]
"""Code of a refusal, or one of those below; and what is needed, if that is known."""
ENDED, LAWS, JUDGED, BROKEN = "ended", "laws", "judged", "broken"
"""Codes of what refuses nothing: the run ended before; no law speaks of it; nothing to judge; what
a distribution registers cannot be used."""
NEEDED = ("device", "package")
"""Codes of refusals that name what is needed in ``about``."""
WORDS = {
    "machine": "for other chips or releases",
    "rules": "refused by the support rules",
    "supports": "refused by their own supports",
    "time": "with modules that take longer to build than the run may",
    "module": "without a module that was built",
    "only": "without what --only asks for",
    "feature": "without a feature that every problem has",
    "operation": "of another operation",
    "memory": "without room in memory",
    "device": "for another device",
    "package": "without an optional package",
    ENDED: "not begun when the run ended",
    LAWS: "of an operation that no selected law speaks of",
    JUDGED: "with nothing to judge",
    BROKEN: "registered by a distribution, and left out",
}
"""Words on what was not run, behind its number."""


def reason_of(refusal: Refusal) -> Reason:
    """Return why a refusal keeps an implementation from being run."""
    return refusal.code, refusal.about if refusal.code in NEEDED else ""


def reasons_text(reasons: Iterable[Reason]) -> str:
    """Return how often each reason occurs, the most frequent first: "31 need a GPU, 2 ..."."""
    told = []
    for (code, about), count in Counter(reasons).most_common():
        words = WORDS.get(code, code)
        if about:
            words = f"need{'s' if count == 1 else ''} {about}"
        told.append(f"{count} {words}")
    return ", ".join(told)
