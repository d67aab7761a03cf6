"""What becomes of precompiled kernels, and of the calls that launch them, in another release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .asking import DIES, NOT_ASKED, SHARED_MEMORY, Answer, Selection
from .kernels import Kernel, KernelList

KEPT, REBUILT, GONE, NEW = "kept", "rebuilt", "gone", "new"
STATES: Mapping[str, str] = {
    KEPT: "the same bits under the same name",
    REBUILT: "other bits under the same name",
    GONE: "the candidate's list lacks it",
    NEW: "the baseline's list lacks it",
}
"""What becomes of a listed kernel."""
SAME, OTHER, RAISES_NOW, DIES_NOW, RUNS_NOW = (
    "same kernel",
    "other kernel",
    "raises now",
    "host dies now",
    "launches now",
)
CALL_STATES: Mapping[str, str] = {
    DIES_NOW: "launched a kernel, and now the host's process ends in the selection",
    RAISES_NOW: "launched a kernel, and now some call of the kind raises",
    REBUILT: "launch a kernel of the same name with other bits",
    OTHER: "launch a kernel of another name",
    RUNS_NOW: "raised, and launch a kernel now",
    SAME: "launch the same kernels with the same bits",
}
"""What becomes of a kind of call, the worst first: a kind is the worst of its calls."""
Name = tuple[str, str]
"""A build and the name of a kernel."""


@dataclass(frozen=True)
class BuildChange:
    """What became of the kernels of one build, such as ``100f``.

    Attributes:
        build: the chip or family that they are built for.
        counts: number of kernels by state, of ``STATES``.
        resized: kernels of both lists that ask for other shared memory now.
        too_large: kernels of the baseline and of the candidate that ask for more shared memory
            than a block may have.
    """

    build: str
    counts: Mapping[str, int]
    resized: int
    too_large: tuple[int, int]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {
            "build": self.build,
            **{state: self.counts.get(state, 0) for state in STATES},
            "resized": self.resized,
            "too_large": list(self.too_large),
        }


def list_changes(before: KernelList, after: KernelList, sm: int) -> list[BuildChange]:
    """Compare the kernels that two releases list for a chip, by build; its own builds first."""
    old, new = _listed(before, sm), _listed(after, sm)
    builds = {build for build, _ in old | new}
    found = []
    for build in sorted(builds, key=lambda each: (each != str(sm), each)):
        ours = {name: kernel for name, kernel in old.items() if name[0] == build}
        theirs = {name: kernel for name, kernel in new.items() if name[0] == build}
        both = ours.keys() & theirs.keys()
        counts = Counter(
            KEPT if ours[name].sha256 == theirs[name].sha256 else REBUILT for name in both
        )
        counts |= Counter({GONE: len(ours) - len(both), NEW: len(theirs) - len(both)})
        resized = sum(ours[name].shared_memory != theirs[name].shared_memory for name in both)
        large = _too_large(ours), _too_large(theirs)
        found.append(BuildChange(build, counts, resized, large))
    return found


def _listed(kernels: KernelList, sm: int) -> dict[Name, Kernel]:
    return {(each.build, each.name): each for each in kernels.kernels if each.runs_on(sm)}


def _too_large(kernels: Mapping[Name, Kernel]) -> int:
    return sum(each.shared_memory > SHARED_MEMORY for each in kernels.values())


@dataclass(frozen=True)
class CallChange:
    """What became of a kind of call on a chip.

    Attributes:
        state: one of ``CALL_STATES``.
        before, after: the answers of both releases to it.
    """

    state: str
    before: Selection
    after: Selection

    @property
    def kernels(self) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
        """Names of the kernels that a call launched and that it launches now, where they differ."""
        calls = zip(self.before.answers, self.after.answers, strict=False)
        pairs = ((_names(old), _names(new)) for old, new in calls if not (old.error or new.error))
        return tuple(dict.fromkeys(pair for pair in pairs if pair[0] != pair[1]))

    @property
    def error(self) -> str:
        """The error of the first call that launched a kernel and raises now; empty if none does."""
        pairs = zip(self.before.answers, self.after.answers, strict=False)
        return next((new.error for old, new in pairs if new.error and not old.error), "")


def call_changes(
    before: Sequence[Selection],
    after: Sequence[Selection],
    old: KernelList,
    new: KernelList,
) -> list[CallChange]:
    """Compare the answers of two releases, both to the same kinds of call in the same order.

    A kind of which no call ever launches a kernel, or which one of them was not asked, is left out.

    Args:
        before, after: the answers of the baseline and of the candidate.
        old, new: the lists of both.
    """
    digests = _digests(old), _digests(new)
    found = []
    for one, other in zip(before, after, strict=True):
        state = _state(one, other, *digests)
        if state:
            found.append(CallChange(state, one, other))
    return found


def _digests(kernels: KernelList) -> Mapping[str, str]:
    return {name: kernel.sha256 for name, kernel in kernels.by_name.items()}


def _state(
    before: Selection, after: Selection, old: Mapping[str, str], new: Mapping[str, str]
) -> str:
    """Return what became of a kind; empty where nothing can be said of it."""
    if NOT_ASKED in (before.outcome, after.outcome):
        return ""
    if after.outcome == DIES:
        return DIES_NOW if before.kernels else ""
    if before.outcome == DIES:
        return RUNS_NOW if after.kernels else ""
    pairs = zip(before.answers, after.answers, strict=True)
    states = {_call_state(one, other, old, new) for one, other in pairs}
    return next((state for state in CALL_STATES if state in states), "")


def _call_state(
    before: Answer, after: Answer, old: Mapping[str, str], new: Mapping[str, str]
) -> str:
    if before.error or after.error:
        if before.error and after.error:
            return ""
        return RAISES_NOW if after.error else RUNS_NOW
    names = _names(before)
    if names != _names(after):
        return OTHER
    return SAME if all(old.get(name) == new.get(name) for name in names) else REBUILT


def _names(answer: Answer) -> tuple[str, ...]:
    """Return the kernels that a call launches, in their order: a MoE launches two."""
    return tuple(each.kernel for each in answer.launches)
