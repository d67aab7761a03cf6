"""Findings of one implementation that have one cause, as one finding.

Several laws fail for one fault of a kernel. Once all laws have ended, experiments tell faults
apart, see ``search.causes``. Until then, and where each failure costs a process, a fault is
recognised by the values that all failing problems share and no passing one has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from ...reference import Problem, problem_from_json
from ..verdicts.verdict import Verdict
from .ledger import holds
from .report import Finding, ImplementationReport, LawReport, Separated

ANSWER_KINDS = ("numeric", "nan", "insensitive", "nondeterministic", "shape")
"""Kinds of a FAIL that are one fault seen by different laws: the answer is wrong."""
IDENTITIES = ("seed", "request_ids", "token_ids")
"""Fields that choose random numbers: no fault depends on them."""
SIZES = {"most_keys": 0, "most_queries": 0, "num_requests": 1, "num_pages": 1}
"""Properties of a problem that count something, beside its fields, and the least of each."""
LENGTHS = ("query_lens", "seq_lens", "kv_lens")
MOST_VALUES = 3
"""Most values of one field that failing problems may have for the field to be named."""
IGNORED = " are ignored: "
"""What a verdict of a case from before verdicts named such options says."""
FEW = 3
"""Failing problems required to conclude that a law fails on every problem, where none passes, or
that it fails for a reason of its own."""


@dataclass(frozen=True)
class Cause:
    """Findings with one cause.

    Attributes:
        members: the findings, in the order of their laws; stored cases come first.
        kinds: the kinds of all their failing problems.
        values: what the failing problems share, as a predicate of the ledger.
        failing: problems that fail.
        passing: problems that pass though they have these values.
        others: problems without these values; they pass.
        separated: whether experiments have told it from others; the most telling finding is the
            first one, then.
    """

    members: tuple[Finding, ...]
    kinds: tuple[str, ...]
    values: dict[str, Any]
    failing: int
    passing: int
    others: int
    separated: bool = False

    @property
    def finding(self) -> Finding:
        """The finding that tells most, or has the smallest problem."""
        if self.separated:
            return self.members[0]
        return min(self.members, key=lambda each: each.problem.work)

    @property
    def ignored(self) -> str:
        """Which options are ignored, where the finding is of another kind."""
        said = (
            each.verdict
            for each in self.members
            if each.verdict.kind == "insensitive"
            and (each.verdict.ignored or IGNORED in each.verdict.message)
        )
        alone = self.finding.verdict.kind == "insensitive"
        return "" if alone else next((one.message.partition("; ")[0] for one in said), "")

    @property
    def laws(self) -> tuple[str, ...]:
        """Names of the laws that show it."""
        return tuple(dict.fromkeys(each.law for each in self.members))

    @property
    def telling(self) -> bool:
        """Whether more than its own problem is known to fail."""
        return self.failing + self.passing + self.others > 1

    @property
    def sentence(self) -> str:
        """Which problems fail, in numbers."""
        asked = self.failing + self.passing
        if not self.values:
            return f"fails in {self.failing} of {asked} problems"
        words = " and ".join(_words(name, wanted) for name, wanted in self.values.items())
        with_it = f"fails in {self.failing} of {asked} problems with {words}"
        return f"{with_it}, in 0 of {self.others} without"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary: the finding's fields, its laws and its cause."""
        counts = {"failing": self.failing, "passing": self.passing, "others": self.others}
        return {
            **self.finding.to_json(),
            "laws": list(self.laws),
            "kinds": list(self.kinds),
            "cause": {"values": self.values, **counts},
            "ignored": self.ignored,
        }


def causes_of(report: ImplementationReport) -> list[Cause]:
    """Return all findings of an implementation, those with one cause together."""
    separated = [_of(each) for each in report.separation.causes if each.findings]
    told = {id(each) for cause in separated for each in cause.members}
    evidence = [
        *(_Evidence(law.finding, law) for law in report.laws if law.finding),
        *(_Evidence(each, LawReport(each.law)) for each in report.replayed),
    ]
    evidence = [each for each in evidence if id(each.finding) not in told]
    groups: list[list[_Evidence]] = []
    # A law that judges only problems with a window sees none pass: other laws see those without.
    evidence = [
        replace(
            each,
            elsewhere=tuple(p for e in evidence if e.fault == each.fault for p in e.passing),
        )
        for each in evidence
    ]
    alive = any(map(_passing, report.laws))
    for each in evidence:
        own = next((group for group in groups if group[0].is_one_with(each, alive=alive)), None)
        if own is None:
            groups.append([each])
        else:
            own.append(each)
    order = [id(finding) for finding in report.findings]
    found = [_cause(sorted(group, key=lambda e: order.index(id(e.finding)))) for group in groups]
    found += separated
    return sorted(found, key=lambda each: min(order.index(id(one)) for one in each.members))


def _of(separated: Separated) -> Cause:
    """Return a cause that experiments have told from others."""
    kinds = {each.verdict.kind for each in separated.findings if each.verdict.kind}
    counts = (separated.failing, separated.passing, separated.others)
    return Cause(
        tuple(separated.findings), tuple(sorted(kinds)), separated.values, *counts, separated=True
    )


def cause_of(causes: Iterable[Cause], finding: Finding) -> Cause | None:
    """Return the one of an implementation's causes that a finding belongs to."""
    return next((one for one in causes if any(each is finding for each in one.members)), None)


def telling_values(law: LawReport, verdict: Verdict) -> dict[str, Any]:
    """Return the values of all problems of a law that fail alike; none where others pass too."""
    one = _Evidence(Finding("", law.law, verdict, _latest(law, verdict)), law)
    return one.values if one.exact else {}


def _latest(law: LawReport, verdict: Verdict) -> Problem:
    return next(
        each.problem for each in reversed(law.problems.values()) if each.status == verdict.status
    )


def _cause(group: Sequence[_Evidence]) -> Cause:
    first = max((one for one in group if one.exact), key=lambda one: len(one.failing), default=None)
    failing = {each.id: each for one in group for each in one.failing}
    # What else is stuck there was made of a law's problem, whose values say nothing of it.
    stuck = first is not None and bool(first.finding.place)
    if first is not None and stuck:
        failing = {name: each for name, each in failing.items() if holds(each, first.values)}
    # A law that sees the fault in few problems says little of those on which it passes.
    wide = [
        one
        for one in group
        if one.exact and all(holds(each, one.values) for each in failing.values())
    ]
    passed, values = _told_apart(failing, group if stuck else wide or group)
    if not passed:
        passed, values = _told_apart(failing, group)
        passed = passed if values else {}
    with_them = sum(holds(each, values) for each in passed.values())
    return Cause(
        tuple(one.finding for one in group),
        tuple(sorted({kind for one in group for kind in one.kinds})),
        values,
        len(failing),
        with_them,
        len(passed) - with_them,
    )


def _told_apart(
    failing: Mapping[str, Problem], group: Sequence[_Evidence]
) -> tuple[dict[str, Problem], dict[str, Any]]:
    """Return the problems that pass under some laws, and the values of those that fail."""
    passed = {each.id: each for one in group for each in one.passing if each.id not in failing}
    return passed, shared_values(list(failing.values()), list(passed.values()))


@dataclass(frozen=True)
class _Evidence:
    """A finding, and the verdicts of its law on all its problems.

    Attributes:
        elsewhere: problems that pass under laws with findings of the same kind.
    """

    finding: Finding
    law: LawReport
    elsewhere: tuple[Problem, ...] = ()

    @cached_property
    def fault(self) -> tuple[str, str]:
        """What the finding has in common with others of one cause."""
        one = self.finding
        if one.entry or one.contradicts:
            return ("ledger", one.entry or f"contradicts {one.contradicts}")
        return _fault(one.verdict.status, one.verdict.kind)

    @cached_property
    def failing(self) -> list[Problem]:
        return list({each.id: each for each, _ in self._failed}.values())

    @property
    def kinds(self) -> set[str]:
        return {kind for _, kind in self._failed if kind}

    @cached_property
    def passing(self) -> list[Problem]:
        return _passing(self.law)

    @cached_property
    def values(self) -> dict[str, Any]:
        return shared_values(self.failing, self.passing or self.elsewhere)

    @cached_property
    def exact(self) -> bool:
        """Whether no problem that passes has the values of those that fail."""
        if not self.passing and (len(self.failing) < FEW or not self.values):
            return len(self.failing) >= FEW
        return not any(holds(each, self.values) for each in self.passing or self.elsewhere)

    def is_one_with(self, other: _Evidence, *, alive: bool) -> bool:
        """Whether both have one cause: the problem of one fails for the reason of the other.

        Args:
            alive: whether any problem passes, under any law.
        """
        if self.fault != other.fault:
            return False
        # A law may call with another problem than its own, but it is stuck in the same place.
        place = self.finding.place
        if self.fault[0] == "ledger" or (place and place == other.finding.place):
            return True
        known = self._accounts_for(other) or other._accounts_for(self)
        # A kernel that dies or is stuck in every call: laws have no problem in common to show it.
        always = not alive and self.fault[0] in ("CRASH", "HANG") and bool(self.law.problems)
        return known or self._is_like(other) or (always and not place)

    def _is_like(self, other: _Evidence) -> bool:
        """Whether problems with the same features fail, though some with them pass."""
        features = [each.values.keys() - SIZES.keys() for each in (self, other)]
        fewer, more = sorted(features, key=len)
        return set() != fewer <= more and (
            holds(other.finding.problem, self.values) or holds(self.finding.problem, other.values)
        )

    def _accounts_for(self, other: _Evidence) -> bool:
        about = other.finding.verdict.about
        wrong = [other.finding.problem, *([problem_from_json(about)] if about else [])]
        if any(each.id in {failed.id for failed in self.failing} for each in wrong):
            return True
        passed = {each.id for each in self.passing}
        return (
            self.exact
            and any(each.id not in passed and holds(each, self.values) for each in wrong)
            and not other.tells_apart(self.values)
        )

    def tells_apart(self, values: Mapping[str, Any]) -> bool:
        """Whether what fails here has other values in common, and problems with these pass."""
        return (
            self.exact
            and len(self.failing) >= FEW
            and not self.values.keys() >= values.keys()
            and any(holds(each, values) for each in self.passing)
        )

    @cached_property
    def _failed(self) -> list[tuple[Problem, str]]:
        """The problems that fail as the finding does, and the kind of each failure."""
        own = (self.finding.problem, self.finding.verdict.kind)
        status = "KNOWN" if self.finding.entry else self.finding.verdict.status
        alike = [
            (each.problem, each.kind)
            for each in self.law.problems.values()
            if each.status == status
            and (self.finding.entry or _fault(each.status, each.kind) == self.fault)
        ]
        return [own, *alike]


def _passing(law: LawReport) -> list[Problem]:
    seen = law.problems.values()
    return [each.problem for each in seen if each.status == "PASS" and not each.vacuous]


def _fault(status: str, kind: str) -> tuple[str, str]:
    """Return what verdicts on one fault have in common; a HANG's kind is where it began."""
    if status == "HANG" or (status == "FAIL" and kind in ANSWER_KINDS):
        return (status, "")
    return (status, kind)


def shared_values(failing: Sequence[Problem], passing: Sequence[Problem]) -> dict[str, Any]:
    """Return what all failing problems share and no passing one has, or as few as possible have.

    Values of features in use come first, then sizes; the fewest that do. Simplest values are named
    only where nothing that passes is left with them, such as ``causal = false``.
    """
    used, simplest = _conditions(failing)
    values, left = _fewest(used, passing)
    if left:
        more, none_left = _fewest([*used, *simplest], passing)
        values = values if none_left else more
    return values


Condition = tuple[str, Any]


def _fewest(
    conditions: Sequence[Condition], passing: Sequence[Problem]
) -> tuple[dict[str, Any], int]:
    """Drop the conditions, the last ones first, without which no more passing problem is left."""
    everything = (1 << len(passing)) - 1
    # A bit for each passing problem that a condition leaves.
    leaves = [
        sum(1 << i for i, each in enumerate(passing) if holds(each, {name: wanted}))
        for name, wanted in conditions
    ]

    def left(kept: Iterable[int]) -> int:
        bits = everything
        for index in kept:
            bits &= leaves[index]
        return bits

    kept = list(range(len(conditions)))
    least = left(kept)
    for index in reversed(range(len(conditions))):
        fewer = [each for each in kept if each != index]
        if left(fewer) == least:
            kept = fewer
    return {conditions[index][0]: conditions[index][1] for index in kept}, least.bit_count()


def _conditions(failing: Sequence[Problem]) -> tuple[list[Condition], list[Condition]]:
    """Return what all failing problems share: features and sizes in use, and simplest values."""
    first = failing[0]
    features: list[Condition] = []
    sizes: list[Condition] = []
    simplest: list[Condition] = []
    for name, default in _names(first):
        values: list[Any] = sorted({getattr(each, name, None) for each in failing}, key=str)
        if None in values and default is not None:
            continue
        if values == [default]:
            if isinstance(default, bool | str) or not _counts(name, first):
                simplest.append((name, default))
        elif default in values or len(values) > MOST_VALUES:
            low = min(values) if isinstance(default, int | float) else default
            if low != default and low > default:
                sizes.append((name, {"min": low}))
        elif isinstance(default, bool | str | None):
            features.append((name, values[0] if len(values) == 1 else values))
        elif min(values) > default:
            (sizes if _counts(name, first) else features).append((name, {"min": min(values)}))
        elif not _counts(name, first):
            features.append((name, values[0] if len(values) == 1 else values))
    lengths = [(name, {"has": each}) for name in LENGTHS for each in _common(failing, name)]
    return [*features, *sizes, *lengths], simplest


def _names(problem: Problem) -> Iterator[tuple[str, Any]]:
    """Yield the fields and properties that may tell failing problems apart, and their simplest."""
    for field in fields(problem):
        if field.name not in (*IDENTITIES, *LENGTHS, "operation"):
            yield field.name, field.default
    for name, kind in vars(type(problem)).items():
        if isinstance(kind, property) and not name.startswith("_"):
            if name in SIZES:
                yield name, SIZES[name]
            elif isinstance(getattr(problem, name), bool):
                yield name, False


def _counts(name: str, problem: Problem) -> bool:
    """Whether a value says how large a problem is."""
    return name in SIZES or (
        type(getattr(problem, name)) is int and name not in ("window_left", "page_order")
    )


def _common(failing: Sequence[Problem], name: str) -> list[int]:
    """Return the lengths that every failing problem has among those of a field."""
    first = set(getattr(failing[0], name, ()))
    found = first.intersection(*(getattr(each, name, ()) for each in failing[1:]))
    return sorted(found, reverse=True)


def _words(name: str, wanted: object) -> str:
    """Return a condition of a predicate in words."""
    if isinstance(wanted, Mapping):
        if "has" in wanted:
            return f"{wanted['has']} among {name}"
        if "min" not in wanted:
            return f"{name} of {wanted['max']} and less"
        return f"{name} of {wanted['min']} and more"
    if wanted is True:
        return name
    if isinstance(wanted, list):
        # In one order, whichever was drawn first.
        told = sorted(wanted, key=lambda each: (str(type(each)), each))
        return f"{name} {' or '.join(map(str, told))}"
    return f"{name}={wanted}"
