"""What a comparison of two releases finds, and what each kind of change means by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ....properties.verdicts.text import count_of

Action = str
BLOCK, CONDITION, REPORT = "block", "condition", "report"
ACTIONS = (BLOCK, CONDITION, REPORT)
"""What a finding does: forbids the bump; allows it under a rule; is reported and does nothing."""
AREAS = (
    *("release", "surface", "declarations", "binaries", "behaviour", "speed", "liveness"),
    "compile",
)
USED, MAYBE_USED, UNKNOWN_RECEIVER, UNUSED = "used", "may be used", "receiver unknown", "not used"
USES = (USED, MAYBE_USED, UNKNOWN_RECEIVER, UNUSED)
"""What an engine's source says of a change. It may be used where that cannot be ruled out: by a
name that is computed, or a string. The receiver is unknown where all that is seen are calls of a
method of that name, on objects whose class the source does not say."""
Chip = int | str
"""Compute capability times ten, or ``"cpu"``."""


@dataclass(frozen=True)
class Change:
    """A kind of change.

    Attributes:
        area: the area of the comparison, one of ``AREAS``.
        action: what it does unless a policy says otherwise.
        means: one sentence.
    """

    area: str
    action: Action
    means: str


CHANGES: Mapping[str, Change] = {
    "release-broken": Change("release", BLOCK, "the candidate does not import, or hangs doing so"),
    "callable-removed": Change("surface", BLOCK, "a callable that serving engines use is gone"),
    "callable-added": Change("surface", REPORT, "a callable that the baseline does not have"),
    "parameter-removed": Change("surface", BLOCK, "a call that names the parameter raises"),
    "parameter-renamed": Change("surface", BLOCK, "a call that names the parameter raises"),
    "parameter-required": Change("surface", BLOCK, "a call that does not give it raises"),
    "parameter-added": Change("surface", REPORT, "an option that the baseline does not have"),
    "positional-meaning": Change(
        "surface", BLOCK, "a call by position gives its value to another parameter"
    ),
    "positional-refused": Change(
        "surface", CONDITION, "what was taken by position is taken by keyword only, or not at all"
    ),
    "default-changed": Change("surface", REPORT, "a call that leaves it out asks for another"),
    "enum-number-moved": Change("surface", CONDITION, "the number of a member means another one"),
    "enum-member-removed": Change("surface", BLOCK, "a member that is named is gone"),
    "enum-member-added": Change("surface", REPORT, "a member that the baseline does not have"),
    "name-removed": Change("surface", REPORT, "a public name that can be imported no more"),
    "name-added": Change("surface", REPORT, "public names that the baseline does not have"),
    "refusal-added": Change("surface", REPORT, "something that a callable did not refuse before"),
    "refusal-removed": Change("surface", REPORT, "something that a callable refuses no more"),
    "constant-changed": Change("surface", REPORT, "a constant of the kernels"),
    "declared-lost": Change("declarations", CONDITION, "the release declares less than before"),
    "declared-gained": Change("declarations", REPORT, "the release declares more than before"),
    "support-lost": Change("declarations", CONDITION, "the support rules refuse what they allowed"),
    "support-gained": Change("declarations", REPORT, "the support rules allow what they refused"),
    "release-unknown": Change(
        "declarations", CONDITION, "the support rules do not know the candidate's version"
    ),
    "internals-lost": Change(
        "declarations", REPORT, "a compiler's filter, a template or a branch covers less"
    ),
    "artifact-changed": Change("declarations", REPORT, "other binaries, of which nothing is known"),
    "artifact-same": Change("declarations", REPORT, "the same binaries: what is known still holds"),
    "kernel-lost": Change(
        "binaries", BLOCK, "kernels of a library have no code for a chip any more"
    ),
    "kernel-stub": Change(
        "binaries", BLOCK, "kernels of a library only return on a chip, or print and return"
    ),
    "kernel-jit": Change(
        "binaries", CONDITION, "kernels of a library have PTX only for a chip, compiled when loaded"
    ),
    "kernel-replaced": Change(
        "binaries", REPORT, "kernels are gone of which the same functions have others"
    ),
    "kernel-gained": Change("binaries", REPORT, "kernels of a library have code for a chip now"),
    "calls-raise": Change("binaries", BLOCK, "calls that launched a precompiled kernel raise now"),
    "calls-die": Change(
        "binaries", BLOCK, "the host dies in calls that launched a precompiled kernel"
    ),
    "parameters-misfit": Change(
        "binaries", BLOCK, "the host passes other parameters than precompiled kernels take"
    ),
    "calls-rebuilt": Change(
        "binaries", CONDITION, "calls launch kernels of the same names with other bits"
    ),
    "calls-rerouted": Change("binaries", CONDITION, "calls launch kernels of other names"),
    "calls-unasked": Change(
        "binaries", CONDITION, "kernels were rebuilt, and which calls launch them is not known"
    ),
    "calls-gained": Change("binaries", REPORT, "calls that raised launch precompiled kernels now"),
    "listed-rebuilt": Change(
        "binaries", REPORT, "precompiled kernels have other bits under the same names"
    ),
    "listed-gone": Change("binaries", REPORT, "precompiled kernels are listed no more"),
    "listed-new": Change("binaries", REPORT, "precompiled kernels are listed for the first time"),
    "listed-resized": Change(
        "binaries", REPORT, "precompiled kernels ask for other shared memory under the same names"
    ),
    "listed-too-large": Change(
        "binaries", REPORT, "precompiled kernels ask for more shared memory than a block may have"
    ),
    "new-failure": Change("behaviour", BLOCK, "right with the baseline, wrong with the candidate"),
    "worse-failure": Change("behaviour", BLOCK, "wrong with both, and hangs or dies now"),
    "candidate-only-failure": Change(
        "behaviour", REPORT, "wrong with the candidate; the baseline has no such code"
    ),
    "known-of-both": Change(
        "behaviour", REPORT, "wrong with the candidate, and by the ledger with both, by chance"
    ),
    "still-failing": Change("behaviour", REPORT, "wrong with both"),
    "fixed": Change("behaviour", REPORT, "wrong with the baseline, right with the candidate"),
    "flaky": Change("behaviour", CONDITION, "a failure of the candidate that did not show again"),
    "baseline-flaky": Change(
        "behaviour", REPORT, "a failure of the baseline only that did not show again"
    ),
    "bits-changed": Change("behaviour", REPORT, "other bits, inside of the error bound"),
    "kernels-changed": Change("behaviour", REPORT, "the same calls launch other kernels"),
    "implementation-lost": Change("behaviour", CONDITION, "it ran with the baseline only"),
    "slower": Change("speed", REPORT, "calls take longer by more than the policy's limit"),
    "faster": Change("speed", REPORT, "calls take less by more than the policy's limit"),
    "more-memory": Change("speed", REPORT, "calls need more memory, or more of their workspace"),
    "hang": Change("liveness", BLOCK, "a call of the candidate does not end"),
    "known-hang": Change("liveness", CONDITION, "a hang that is known of the candidate"),
    "hang-stays": Change("liveness", REPORT, "a hang that is known of both"),
    "compile-fixed": Change("compile", REPORT, "a module that did not compile before does now"),
    "compile-failed": Change("compile", CONDITION, "a module that compiled before does not now"),
}
"""Kinds of change. A policy's table ``actions`` names them."""


@dataclass(frozen=True)
class Finding:
    """One difference between two releases.

    Attributes:
        id: unique in a report, and the same in every run: ``area/change/subject``.
        change: one of ``CHANGES``.
        subject: callable, enum, implementation, artifact.
        message: one or a few sentences.
        chips: the chips on which it holds; everywhere if empty.
        rule: what to do about it, where that is known.
        baseline, candidate: what each side has, by name, to stand side by side.
        laws: the laws that show it.
        problem: the smallest that shows it, as JSON; None where it is not about one.
        replay: the command, by side, that judges the problem again.
        entry: id of the ledger entry that explains it, or of the support rule.
        issue: public report, where there is one.
        reason: the reason of the entry.
        found_by: ``"drawn"`` or ``"corpus"``, or both; nothing where no problem was judged.
        count: number of problems, members or names that are summed up in it.
        action: see ``ACTIONS``; what the policy made of it.
        accepted: why the policy accepts it, where it does.
        uses: ``status``, one of ``USES``, ``count`` of places and the first of them, ``places``:
            ``file``, ``line``, ``how``; ``unknown_count`` and ``unknown`` alike, for calls on
            objects of unknown class; None where no engine's source was asked.
    """

    id: str
    change: str
    subject: str
    message: str
    chips: tuple[Chip, ...] = ()
    rule: str = ""
    baseline: Mapping[str, Any] = field(default_factory=dict)
    candidate: Mapping[str, Any] = field(default_factory=dict)
    laws: tuple[str, ...] = ()
    problem: Mapping[str, Any] | None = None
    replay: Mapping[str, str] = field(default_factory=dict)
    entry: str = ""
    issue: str = ""
    reason: str = ""
    found_by: tuple[str, ...] = ()
    count: int = 1
    action: Action = ""
    accepted: str = ""
    uses: Mapping[str, Any] | None = None

    @property
    def unused(self) -> bool:
        """Whether an engine's source was asked, and does not use what changed."""
        return self.uses is not None and self.uses["status"] == UNUSED

    @property
    def doubted(self) -> bool:
        """Whether an engine's source has no more of it than calls on objects of unknown class."""
        return self.uses is not None and self.uses["status"] == UNKNOWN_RECEIVER

    @property
    def area(self) -> str:
        """Which part of the comparison it comes from."""
        return CHANGES[self.change].area

    def concerns(self, chip: Chip) -> bool:
        """Whether it holds on a chip."""
        return not self.chips or chip in self.chips

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {"area": self.area, **{each.name: getattr(self, each.name) for each in fields(self)}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Finding:
        """Read back what ``to_json`` returned; ``read_report`` has checked it."""
        read: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in data.items()
            if name != "area"
        }
        return cls(**read)


def uses_in_words(uses: Mapping[str, Any] | None, most: int | None = None) -> str:
    """Return what an engine's source says of a change, with its places; empty if none was asked.

    Args:
        uses: the uses of a finding.
        most: places that are named; all that it has if None.
    """
    if uses is None:
        return ""
    told = _places_in_words(uses["places"], uses["count"], most)
    unknown = _places_in_words(uses.get("unknown", ()), uses.get("unknown_count", 0), most)
    status = str(uses["status"])
    if status == UNKNOWN_RECEIVER:
        return f"{status}: {unknown}"
    parts = [f"{status}: {told}" if told else status]
    parts += [f"{UNKNOWN_RECEIVER}, and not counted: {unknown}"] if unknown else []
    return ". ".join(parts)


def _places_in_words(places: Sequence[Mapping[str, Any]], count: int, most: int | None) -> str:
    named = [f"{each['file']}:{each['line']} ({each['how']})" for each in places[:most]]
    more = count - len(named)
    return "; ".join([*named, *([f"{more} more"] if more > 0 else [])])


def engines_in_words(report: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each engine's source that was read, and each file that was not."""
    told: list[str] = []
    for each in report.get("engines", ()):
        files = count_of(each["files"], "Python file")
        told.append(f"{each['path']}: {files}, of which {each['naming']} name FlashInfer")
        told += [f"{one['file']}: {one['why']}; its names may be used" for one in each["unread"]]
    return told


def spared(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a report's findings that would count, if the engine's source used what changed."""
    actions = report["policy"]["actions"]
    return [
        each
        for each in report["findings"]
        if (each.get("uses") or {}).get("status") == UNUSED
        and actions.get(each["change"]) != REPORT
        and not each["accepted"]
    ]


def finding(change: str, subject: str, message: str, **more: Any) -> Finding:  # noqa: ANN401
    """Make a finding; its id is made of the change, the subject and ``detail``."""
    detail = more.pop("detail", "")
    parts = (CHANGES[change].area, change, subject, *([detail] if detail else []))
    return Finding("/".join(parts).replace(" ", "-"), change, subject, message, **more)


def chip_order(chip: Chip) -> tuple[bool, int]:
    """Sort chips: the CPU first, then by compute capability."""
    return (isinstance(chip, int), chip if isinstance(chip, int) else 0)
