"""FlashInfer's precompiled kernels: what became of them, and of the calls that they serve."""

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
from ...binaries.flashinfer.kernels import ATTENTION, KernelList, find_kernels
from ...binaries.flashinfer.listing import LISTED
from ...binaries.flashinfer.questions import GEMM, MOE, kinds
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
"""What the list of precompiled attention kernels is called in findings."""
CALLS = "kernels of calls"
"""What is not tested where no call of attention can be asked."""
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
    """Both releases' kernels of one list, and their answers to the calls of an engine.

    Attributes:
        title: what the list is called.
        lists: the lists by side.
        level: ``"selected"``, or ``"listed"`` where no call could be asked.
        answers: the answers by side; none where no call could be asked.
        functions: the functions whose calls are compared.
        why: why calls could not be asked; empty where they were.
    """

    title: str
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


@dataclass(frozen=True)
class Changes:
    """What became, on a chip, of the kernels of a list and of the calls that launch them."""

    lists: Sequence[BuildChange]
    calls: Sequence[CallChange]

    @classmethod
    def of(cls, kernels: Kernels, sm: int) -> Changes:
        """Compare both releases on a chip."""
        both = kernels.lists[BASELINE], kernels.lists[CANDIDATE]
        return cls(list_changes(*both, sm), kernels.calls(sm))


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
        asked = [int(chip) for chip in chips]
        lists = _lists(comparison, ATTENTION, tell)
        attention = _kernels(comparison, LIST, lists, "", functions, asked, tell)
        gemms, missing = _gemms(comparison, functions, asked, tell)
        found: list[Finding] = []
        records = []
        for sm in asked:
            stale = _stale(sm, comparison)
            # Of attention any call may launch what was rebuilt only if none was asked. GEMMs are
            # asked untuned, so that a tuned call may launch others than these.
            attention_stale = stale if attention.level == LISTED else ""
            own = Changes.of(attention, sm)
            found += _findings(attention, sm, own, attention_stale, stale)
            others = []
            for family, kernels in gemms.items():
                changes = Changes.of(kernels, sm)
                said = stale if family.may_be_called(texts) else ""
                found += _findings(kernels, sm, changes, said, stale)
                others.append({"title": family.title, **_record(kernels, changes)})
            artifacts = {side: attention.lists[side].artifact for side in SIDES}
            records.append(
                {
                    "chip": sm,
                    "artifacts": artifacts,
                    "parameter_bytes": _parameter_bytes(attention),
                    **_record(attention, own),
                    "gemms": others,
                }
            )
        return {
            "why": {
                CALLS if each is attention else f"calls of {each.title}": each.why
                for each in (attention, *gemms.values())
                if each.why
            },
            "missing": missing,
            "findings": [each.to_json() for each in found],
            "kernels": records,
        }

    question = {"kernels": chips, "functions": list(functions)}
    try:
        learned = journal.ask(question, compare)
    except (MachineError, UsageRefusedError) as error:
        return comparison.failing(f"--part {BINARIES}: {error.message}", error.exit_code)
    comparison = comparison.skipping({**learned["why"], **learned["missing"]})
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
    comparison: Comparison, functions: Sequence[str], chips: Sequence[int], tell: Tell
) -> tuple[dict[Gemms, Kernels], dict[str, str]]:
    """Read both lists of GEMMs, and ask for their calls; of lists that cannot be had, say why."""
    found: dict[Gemms, Kernels] = {}
    missing: dict[str, str] = {}
    for operation, family in zip((MOE, GEMM), FAMILIES, strict=True):
        try:
            lists = _lists(comparison, family, tell)
        except (MachineError, UsageRefusedError) as error:
            missing[family.title] = error.message
            continue
        found[family] = _kernels(comparison, family.title, lists, operation, functions, chips, tell)
    return found, missing


def _stale(sm: int, comparison: Comparison) -> str:
    before = comparison.name(BASELINE)
    return f"what ran on {capability_name(sm)} with {before} is no evidence there: run it again"


def _lists(comparison: Comparison, family: Gemms | str, tell: Tell) -> dict[str, KernelList]:
    """Read the lists of both sides: of a family of GEMMs, or of attention.

    Raises:
        MachineError, UsageRefusedError: a list cannot be had.
    """
    found = {}
    for side in SIDES:
        folder = comparison.releases[side].folder
        version = release_in(folder).version
        if isinstance(family, Gemms):
            found[side] = find_gemms(folder, version, family, tell=tell)
        else:
            found[side] = find_kernels(folder, version, tell=tell)
    return found


def _kernels(
    comparison: Comparison,
    title: str,
    lists: Mapping[str, KernelList],
    operation: str,
    functions: Sequence[str],
    chips: Sequence[int],
    tell: Tell,
) -> Kernels:
    """Ask both releases for those calls of an operation, or of attention, that functions take."""
    wanted = [each for each in kinds(operation) if function_of(each) in functions]
    if not wanted:
        return Kernels(title, lists, SELECTED)
    answers = {}
    try:
        for side in SIDES:
            folder = str(comparison.releases[side].folder)
            answers[side] = select(folder, wanted, chips, tell=tell)
            if answers[side].level == LISTED:
                why = "there is no nvcc, with which the launcher of a release is built"
                return Kernels(title, lists, why=why)
    except MachineError as error:
        return Kernels(title, lists, why=error.message)
    called = dict.fromkeys(map(function_of, wanted))
    return Kernels(title, lists, SELECTED, answers, tuple(called))


def function_of(feature: Feature) -> str:
    """Return the function of FlashInfer that is called for a kind of call."""
    form = feature.quantisation if feature.operation in (MOE, GEMM) else feature.phase
    return LAUNCHERS[feature.operation, form]


def _findings(
    kernels: Kernels, sm: int, changes: Changes, unasked: str, stale: str
) -> Iterator[Finding]:
    """Yield what became of a list, and of calls that launch from it, on a chip.

    Args:
        kernels: the list and the answers of both releases.
        sm: the chip.
        changes: what became of both.
        unasked: what is no evidence any more where calls that were not asked may launch what was
            rebuilt; else empty.
        stale: what is no evidence any more where calls that were asked do.
    """
    name = capability_name(sm)
    yield from _of_lists(kernels.title, sm, changes.lists, unasked)
    candidate = kernels.answers[CANDIDATE] if kernels.answers else None
    if candidate is not None and (misfits := candidate.misfits(sm)):
        told = misfit_text(candidate, sm)
        yield finding(
            "parameters-misfit", kernels.title, told, detail=name, chips=(sm,), count=len(misfits)
        )
    by_call: dict[tuple[str, str], list[CallChange]] = {}
    for each in changes.calls:
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
        before, after = (" and ".join(filter(None, names)) or "none" for names in first.kernels[0])
        return f"{told}, such as {first.before.feature}: {before}, now {after}"
    return f"{told}, such as {first.before.feature}: {first.after.kernels[0]}"


def _launched(changed: Sequence[CallChange], side: str, state: str) -> int:
    """Count the kernels that the calls launch on a side; none is counted where the host dies."""
    if state == DIES_NOW and side == CANDIDATE:
        return 0
    answers = (each.before if side == BASELINE else each.after for each in changed)
    return len({name for each in answers for name in each.kernels})


def _record(kernels: Kernels, changes: Changes) -> dict[str, Any]:
    """Return what the report holds of a list for a chip, and of its calls."""
    by_function: dict[str, Counter[str]] = {each: Counter() for each in kernels.functions}
    for each in changes.calls:
        by_function[function_of(each.before.feature)][each.state] += 1
    return {
        "level": kernels.level,
        "builds": [each.to_json() for each in changes.lists],
        "calls": [
            {"function": function, **{state: counts[state] for state in CALL_STATES}}
            for function, counts in by_function.items()
        ],
    }
