"""FlashInfer's precompiled attention kernels: what became of them, and of the calls they serve."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....impl.gating import Feature
from ....impl.gating.rules import SELECTED
from ....impl.targets.capability import capability_name
from ....properties.verdicts.text import count_of
from ...answers.journal import Journal
from ...binaries.flashinfer.asking import CHIPS, SHARED_MEMORY
from ...binaries.flashinfer.changes import (
    CALL_STATES,
    DIES_NOW,
    GONE,
    KEPT,
    NEW,
    OTHER,
    RAISES_NOW,
    REBUILT,
    RUNS_NOW,
    BuildChange,
    CallChange,
    call_changes,
    list_changes,
)
from ...binaries.flashinfer.gemms import FAMILIES, Gemms, find_gemms
from ...binaries.flashinfer.kernels import KernelList, find_kernels
from ...binaries.flashinfer.listing import LISTED
from ...binaries.flashinfer.questions import kinds
from ...compile.generating import release_in
from ...console.errors import MachineError, UsageRefusedError
from ...releases.packages import BINARIES
from ...releases.sandboxes import Tell
from ...support.selected import SHOWN_ERROR, Selected, misfit_text, select
from ..sides.releases import BASELINE, CANDIDATE, SIDES
from ..surface.launching import LAUNCHERS, functions_named
from ..surface.uses import Source
from ..verdicts.findings import Finding, finding
from .records import Comparison

LIST = "trtllm-gen attention"
"""What the list of precompiled kernels is called in findings."""
CALLED: Mapping[str, str] = {
    DIES_NOW: "calls-die",
    RAISES_NOW: "calls-raise",
    REBUILT: "calls-rebuilt",
    OTHER: "calls-rerouted",
    RUNS_NOW: "calls-gained",
}
"""Kinds of change by what became of a kind of call."""
LISTS: Mapping[str, str] = {REBUILT: "listed-rebuilt", GONE: "listed-gone", NEW: "listed-new"}
"""Kinds of change by what became of listed kernels."""
STALE = (REBUILT, OTHER)
"""What makes evidence of runs with the baseline stale."""


@dataclass(frozen=True)
class Kernels:
    """Both releases' kernels, and their answers to the calls of an engine.

    Attributes:
        lists: the lists by side.
        level: ``"selected"``, or ``"listed"`` where no call could be asked.
        answers: the answers by side; none where no call could be asked.
        functions: the functions whose calls are compared.
        why: why calls could not be asked; empty where they were.
    """

    lists: Mapping[str, KernelList]
    level: str = LISTED
    answers: Mapping[str, Selected] | None = None
    functions: tuple[str, ...] = ()
    why: str = ""

    def calls(self, sm: int) -> list[CallChange]:
        """Return what became of each kind of call on a chip."""
        if not self.answers:
            return []
        before, after = (
            [each for each in self.answers[side].selections if each.sm == sm] for side in SIDES
        )
        return call_changes(before, after, self.lists[BASELINE], self.lists[CANDIDATE])


def compare_precompiled(
    comparison: Comparison, sources: Sequence[Source], journal: Journal, tell: Tell
) -> Comparison:
    """Compare the kernels that both releases ship, and which of them calls launch.

    Args:
        comparison: the record so far.
        sources: sources of engines, whose calls are asked; all calls are without any.
        journal: the journal, which remembers the answer.
        tell: function that is called with a line of progress now and then.
    """
    chips = [chip for chip in comparison.chips if chip in CHIPS]
    if not chips:
        names = ", ".join(map(capability_name, CHIPS))
        return comparison.skipping({BINARIES: f"of {names} none is asked about"})
    if set(comparison.releases) != set(SIDES):
        return comparison.skipping({BINARIES: "one of the releases could not be had"})
    started = time.monotonic()
    functions = functions_named(each for source in sources for each in source.files)
    texts = [each.data or b"" for source in sources for each in source.files]

    def compare() -> dict[str, Any]:
        kernels = _kernels(comparison, functions, [int(chip) for chip in chips], tell)
        changes = {int(chip): kernels.calls(int(chip)) for chip in chips}
        lists = {int(chip): list_changes(*_both(kernels), int(chip)) for chip in chips}
        gemms, missing = _gemms(comparison, tell)
        others = {
            sm: {title: list_changes(*both, sm) for title, both in gemms.items()} for sm in changes
        }
        found = [
            each
            for sm in changes
            for each in (
                *_findings(kernels, sm, lists[sm], changes[sm], comparison),
                *_of_gemms(sm, others[sm], _stale(sm, comparison), texts),
            )
        ]
        return {
            "why": kernels.why,
            "missing": missing,
            "findings": [each.to_json() for each in found],
            "kernels": [
                {**_record(kernels, sm, lists[sm], changes[sm]), "gemms": _records(others[sm])}
                for sm in changes
            ],
        }

    question = {"kernels": chips, "functions": list(functions)}
    try:
        learned = journal.ask(question, compare)
    except (MachineError, UsageRefusedError) as error:
        return comparison.failing(f"--part {BINARIES}: {error.message}", error.exit_code)
    if learned["why"]:
        comparison = comparison.skipping({"kernels of calls": learned["why"]})
    comparison = comparison.skipping(learned["missing"])
    found = [Finding.from_json(each) for each in learned["findings"]]
    comparison = replace(comparison, kernels=learned["kernels"]).with_findings(found)
    return comparison.timed(BINARIES, started)


def _parameter_bytes(kernels: Kernels) -> dict[str, dict[str, int]]:
    """Return what each release passes to a kernel, if it was built, and what kernels take."""
    taken = {side: dict(kernels.lists[side].parameter_bytes) for side in SIDES}
    if kernels.answers:
        for side, answers in kernels.answers.items():
            taken[side]["passed"] = answers.passed_bytes
    return taken


def _gemms(
    comparison: Comparison, tell: Tell
) -> tuple[dict[str, tuple[KernelList, KernelList]], dict[str, str]]:
    """Read both lists of GEMMs by title; of those that cannot be had, return why."""
    found: dict[str, tuple[KernelList, KernelList]] = {}
    missing: dict[str, str] = {}
    for family in FAMILIES:
        both = _gemms_of(family, comparison, tell)
        if isinstance(both, str):
            missing[family.title] = both
        else:
            found[family.title] = both
    return found, missing


def _gemms_of(
    family: Gemms, comparison: Comparison, tell: Tell
) -> tuple[KernelList, KernelList] | str:
    """Read both lists of a family, or return why they cannot be had."""
    folders = (comparison.releases[side].folder for side in SIDES)
    try:
        before, after = (
            find_gemms(folder, release_in(folder).version, family, tell=tell) for folder in folders
        )
    except (MachineError, UsageRefusedError) as error:
        return error.message
    return before, after


def _records(lists: Mapping[str, Sequence[BuildChange]]) -> list[dict[str, Any]]:
    """Return what the report holds of a chip's GEMMs."""
    return [
        {"title": title, "builds": [each.to_json() for each in changes]}
        for title, changes in lists.items()
    ]


def _of_gemms(
    sm: int, lists: Mapping[str, Sequence[BuildChange]], stale: str, texts: Sequence[bytes]
) -> Iterator[Finding]:
    """Yield what became of the GEMMs that are listed for a chip: no call is asked for them."""
    for family in FAMILIES:
        if family.title in lists:
            said = stale if family.may_be_called(texts) else ""
            yield from _of_lists(family.title, sm, lists[family.title], said)


def _stale(sm: int, comparison: Comparison) -> str:
    before = comparison.name(BASELINE)
    return f"what ran on {capability_name(sm)} with {before} is no evidence there: run it again"


def _both(kernels: Kernels) -> tuple[KernelList, KernelList]:
    return kernels.lists[BASELINE], kernels.lists[CANDIDATE]


def _kernels(
    comparison: Comparison, functions: Sequence[str], chips: Sequence[int], tell: Tell
) -> Kernels:
    """Read both lists, and ask both releases for the calls of some functions.

    Raises:
        MachineError, UsageRefusedError: a list cannot be had.
    """
    folders = {side: comparison.releases[side].folder for side in SIDES}
    lists = {
        side: find_kernels(folder, release_in(folder).version, tell=tell)
        for side, folder in folders.items()
    }
    wanted = [each for each in kinds() if function_of(each) in functions]
    if not wanted:
        return Kernels(lists, SELECTED)
    answers = {}
    try:
        for side, folder in folders.items():
            answers[side] = select(str(folder), wanted, chips, tell=tell)
            if answers[side].level == LISTED:
                why = "there is no nvcc, with which the launcher of a release is built"
                return Kernels(lists, why=why)
    except MachineError as error:
        return Kernels(lists, why=error.message)
    return Kernels(lists, SELECTED, answers, tuple(functions))


def function_of(feature: Feature) -> str:
    """Return the function of FlashInfer that is called for a kind of call."""
    return LAUNCHERS[feature.operation, feature.phase]


def _findings(
    kernels: Kernels,
    sm: int,
    lists: Sequence[BuildChange],
    calls: Sequence[CallChange],
    comparison: Comparison,
) -> Iterator[Finding]:
    name, stale = capability_name(sm), _stale(sm, comparison)
    yield from _of_lists(LIST, sm, lists, stale if kernels.level == LISTED else "")
    candidate = kernels.answers[CANDIDATE] if kernels.answers else None
    if candidate is not None and (misfits := candidate.misfits(sm)):
        told = misfit_text(candidate, sm)
        yield finding("parameters-misfit", LIST, told, detail=name, chips=(sm,), count=len(misfits))
    by_call: dict[tuple[str, str], list[CallChange]] = {}
    for each in calls:
        if each.state in CALLED:
            key = (function_of(each.before.feature), each.state)
            by_call.setdefault(key, []).append(each)
    for (function, state), changed in sorted(by_call.items()):
        yield finding(
            CALLED[state],
            function,
            f"{function} on {name}: {_in_words(state, changed)}",
            detail=name,
            chips=(sm,),
            count=len(changed),
            rule=stale if state in STALE else "",
            baseline={"kernels": _launched(changed, BASELINE, state)},
            candidate={"kernels": _launched(changed, CANDIDATE, state)},
        )


def _of_lists(title: str, sm: int, lists: Sequence[BuildChange], stale: str) -> Iterator[Finding]:
    """Yield what became of a list of kernels for a chip.

    Args:
        title: what the list is called.
        sm: the chip.
        lists: what became of it, by build.
        stale: what is no evidence any more, where no call is asked, so that any may launch what was
            rebuilt; else empty.
    """
    for state, change in LISTS.items():
        if count := sum(each.counts.get(state, 0) for each in lists):
            unasked = state == REBUILT and bool(stale)
            builds = ", ".join(
                f"{each.counts[state]:,} built for {each.build}"
                for each in lists
                if each.counts.get(state, 0)
            )
            told = f"{builds} are {state}"
            rule = stale if unasked else ""
            named = "calls-unasked" if unasked else change
            yield _of_list(named, title, sm, lists, count=count, told=told, rule=rule)
    if resized := sum(each.resized for each in lists):
        told = ", ".join(f"{each.resized:,} built for {each.build}" for each in lists)
        told += " ask for other shared memory under the same name"
        yield _of_list("listed-resized", title, sm, lists, count=resized, told=told)
    large = [sum(each.too_large[side] for each in lists) for side in range(len(SIDES))]
    if any(large):
        told = f"{large[0]:,} and now {large[1]:,} ask for more than the {SHARED_MEMORY:,} bytes "
        told += "of shared memory that a block may have"
        yield _of_list("listed-too-large", title, sm, lists, count=max(large), told=told)


def _of_list(
    change: str,
    title: str,
    sm: int,
    lists: Sequence[BuildChange],
    *,
    count: int,
    told: str,
    rule: str = "",
) -> Finding:
    name = capability_name(sm)
    listed = sum(each.counts.get(state, 0) for each in lists for state in (KEPT, REBUILT, GONE))
    message = f"of the {listed:,} kernels of {title} for {name}, {told}"
    if change == LISTS[NEW]:
        message = f"kernels of {title} for {name}: {told}"
    return finding(change, title, message, detail=name, chips=(sm,), count=count, rule=rule)


def _in_words(state: str, changed: Sequence[CallChange]) -> str:
    """Return how many kinds of call a change is of, and one of them unless the host dies there."""
    told = f"{count_of(len(changed), 'kind')} of call {CALL_STATES[state]}"
    if state in {DIES_NOW, RUNS_NOW}:  # before which it may have died
        return told
    first = changed[0]
    if state == RAISES_NOW:
        errors = Counter(each.error[:SHOWN_ERROR] for each in changed)
        said = "; ".join(f"{count:,} times {error}" for error, count in errors.most_common(2))
        return f"{told}, such as {first.before.feature}: {said}"
    if state == OTHER:
        before, after = first.kernels[0]
        return f"{told}, such as {first.before.feature}: {before}, now {after}"
    return f"{told}, such as {first.before.feature}: {first.after.kernels[0]}"


def _launched(changed: Sequence[CallChange], side: str, state: str) -> int:
    """Count the kernels that the calls launch on a side; none is counted where the host dies."""
    if state == DIES_NOW and side == CANDIDATE:
        return 0
    answers = (each.before if side == BASELINE else each.after for each in changed)
    return len({name for each in answers for name in each.kernels})


def _record(
    kernels: Kernels, sm: int, lists: Sequence[BuildChange], calls: Sequence[CallChange]
) -> dict[str, Any]:
    """Return what the report holds of a chip."""
    by_function: dict[str, Counter[str]] = {each: Counter() for each in kernels.functions}
    for each in calls:
        by_function[function_of(each.before.feature)][each.state] += 1
    return {
        "chip": sm,
        "level": kernels.level,
        "artifacts": {side: kernels.lists[side].artifact for side in SIDES},
        "parameter_bytes": _parameter_bytes(kernels),
        "builds": [each.to_json() for each in lists],
        "calls": [
            {"function": function, **{state: counts[state] for state in CALL_STATES}}
            for function, counts in by_function.items()
        ],
    }
