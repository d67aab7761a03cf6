"""What a comparison of behaviour cannot have judged: then it says nothing of a bump."""

from __future__ import annotations

from collections.abc import Sequence

from ....properties.laws import find_law
from ...console.errors import UsageRefusedError
from ..sides.releases import CANDIDATE
from .comparison import Compared


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
    """Say why no problem was judged with the candidate; empty where one was."""
    if any(tried.judged(CANDIDATE) for each in compared for tried in each.tried):
        return ""
    reasons = (
        each.errors.get(CANDIDATE) or each.reasons.get(CANDIDATE) or _of_problems(each)
        for each in compared
    )
    told = next(filter(None, reasons), "there was none to judge")
    return f"no problem was judged with the candidate: {told.strip().splitlines()[-1]}"


def _of_problems(found: Compared) -> str:
    """Return what the candidate said instead, of the first problem that was tried."""
    for tried in found.tried:
        verdict = tried.verdicts.get(CANDIDATE)
        if verdict is not None:
            return verdict.message or "no law had anything to look at"
    return ""
