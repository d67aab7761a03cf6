"""Made-up failures become findings: one that comes and goes does not speak for others that stay."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kernelproof.ci.answers.journal import Journal
from kernelproof.ci.bump.behaviour import outcomes, steps
from kernelproof.ci.bump.behaviour.asking import Bench
from kernelproof.ci.bump.behaviour.numbers import implementation_json
from kernelproof.ci.bump.behaviour.outcomes import MOST_LOOKS, Context, examine
from kernelproof.ci.bump.behaviour.preparing import laws_to_judge
from kernelproof.ci.bump.behaviour.records import Compared, Comparison, Surveyed, Tried
from kernelproof.ci.bump.sides.plan import BumpPlan
from kernelproof.ci.bump.sides.releases import SIDES, Release
from kernelproof.ci.bump.verdicts.findings import CHANGES, Finding
from kernelproof.ci.console.errors import MachineError
from kernelproof.impl.targets.target import Target
from kernelproof.properties.findings.corpus import Case
from kernelproof.properties.findings.ledger import Entry, Ledger
from kernelproof.properties.isolation.outcome import Outcome, describe_exit
from kernelproof.properties.search.ending import Ending
from kernelproof.properties.space.axes import Axes, narrow
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.properties.verdicts.verdict import PASS, Verdict
from kernelproof.properties.worker.requests import Address, DeviceLostError
from kernelproof.reference import MergeProblem

WRONG = Verdict("FAIL", "nan", "it is NaN")
NAME = "made-up"
VERSIONS = dict(zip(SIDES, ("1", "2"), strict=True))
"""Torch's, by side."""


class Candidate:
    """Fails again on some problems, and counts how often it is asked."""

    def __init__(self, again: Iterable[int]) -> None:
        self.again, self.asked = set(again), list[int]()

    def ask(self, payload: Mapping[str, Any], *_: object, **__: object) -> Outcome:
        tokens = payload["problem"]["num_tokens"]
        self.asked.append(tokens)
        return Outcome("done", (WRONG if tokens in self.again else PASS).to_json())


def failure(tokens: int, law: str = "parity", verdict: Verdict = WRONG) -> Tried:
    problem = MergeProblem(num_states=2, num_tokens=tokens)
    return Tried(law, problem, dict(zip(SIDES, (PASS, verdict), strict=True)))


ADDRESS = Address("made.up:it", None, "cpu")
FULL = "the disk is full"


@pytest.fixture
def find(tmp_path: Path) -> Any:  # noqa: ANN401  a function
    """Return what makes findings of failures."""

    def found(
        candidate: Candidate,
        *tried: Tried,
        cases: Path = tmp_path,
        unwritten: list[str] | None = None,
        keep: list[Compared] | None = None,
        axes: Axes | None = None,
        entries: tuple[Entry, ...] = (),
    ) -> list[Finding]:
        releases = {side: Release(side, tmp_path, sys.executable, ()) for side in SIDES}
        targets = {side: Target(flashinfer=side, torch=torch) for side, torch in VERSIONS.items()}
        plan = BumpPlan((), "cpu", PROFILES["quick"], 0, Ledger(entries), cases, tmp_path)
        sides = cast("dict[str, Any]", dict.fromkeys(SIDES, candidate))
        bench = Bench(plan, sides, Journal(None), Ending())
        address = Address("made.up:it", None, "cpu", modules=("chosen",))
        addresses = dict.fromkeys(SIDES, address)
        compared = Compared(NAME, "made.up:it", addresses=addresses, tried=list(tried), axes=axes)
        examined = examine([compared], Context(bench, releases, targets, ()))
        if keep is not None:
            keep += examined.compared
        if unwritten is not None:
            unwritten += examined.unwritten
        return list(examined.findings)

    return found


def test_all_failures_are_run_again_before_any_is_made_small(find: Any) -> None:  # noqa: ANN401
    asked: list[str] = []

    class Both(Candidate):
        def ask(self, payload: Mapping[str, Any], *_: object, **words: object) -> Outcome:
            asked.append("again" if words.get("fresh") else "smaller")
            return super().ask(payload) if "fresh" in words else Outcome("done", PASS.to_json())

    axes = narrow("merge_state", lambda problems: [None] * len(problems), 10**6)
    crash = Verdict("CRASH", "abort", "it died")
    found = find(Both(again=[33, 44]), failure(33), failure(44, verdict=crash), axes=axes)
    assert [each.change for each in found] == ["new-failure", "new-failure"]
    assert asked[:2] == ["again", "again"]
    assert set(asked[2:]) == {"smaller"}


def test_one_that_does_not_show_again_hides_nothing(find: Any) -> None:  # noqa: ANN401
    candidate = Candidate(again=range(2, 32))
    (found,) = find(candidate, *map(failure, range(1, 32)))
    assert (found.change, found.count, found.problem["num_tokens"]) == ("new-failure", 31, 2)
    assert found.message.endswith("it is NaN (1 other problem failed so once and not again)")
    assert candidate.asked == [1, 2]


def test_each_law_is_looked_at_before_any_twice(find: Any) -> None:  # noqa: ANN401
    candidate = Candidate(again=[9])
    tried = [failure(tokens, "soak") for tokens in range(1, 9)]
    (found,) = find(candidate, *tried, failure(9), failure(10))
    assert candidate.asked == [1, 9]
    assert (found.change, found.laws) == ("new-failure", ("soak", "parity"))


def test_a_failure_that_never_shows_again_is_flaky(find: Any) -> None:  # noqa: ANN401
    candidate = Candidate(again=[])
    (found,) = find(candidate, *map(failure, range(1, 32)))
    assert (found.change, found.problem["num_tokens"]) == ("flaky", 1)
    assert found.message == f"{NAME}: failed once with candidate and not again: it is NaN"
    assert found.rule.startswith(f"soak {NAME} before the bump")
    assert candidate.asked == list(range(1, MOST_LOOKS + 1))


def test_a_case_that_cannot_be_written_costs_no_finding(find: Any, tmp_path: Path) -> None:  # noqa: ANN401
    unwritten: list[str] = []
    (tmp_path / "file").touch()
    (found,) = find(Candidate(again=[3]), failure(3), cases=tmp_path / "file", unwritten=unwritten)
    assert (found.change, found.replay) == ("new-failure", {})
    assert "cannot be written (" in unwritten[0]


def test_one_of_the_baseline_asks_nothing_of_the_candidate(find: Any) -> None:  # noqa: ANN401
    tried = failure(3)
    verdicts = dict(zip(SIDES, (WRONG, PASS), strict=True))
    (found,) = find(Candidate(again=[]), Tried(tried.law, tried.problem, verdicts))
    assert (found.change, found.rule) == ("baseline-flaky", "")
    assert CHANGES[found.change].action == "report"
    assert found.message == (
        f"{NAME}: failed once with baseline and not again, right with candidate: it is NaN"
    )


def test_what_shows_at_once_says_nothing_of_others(find: Any) -> None:  # noqa: ANN401
    (found,) = find(Candidate(again=[3]), failure(3))
    assert found.message == f"{NAME}: right with baseline, wrong with candidate: it is NaN"


class Baseline:
    """Returns these verdicts, one after another, when a problem runs again."""

    def __init__(self, *verdicts: Verdict) -> None:
        self.verdicts, self.notes = list(verdicts), list[str]()
        self.asked: list[Mapping[str, Any]] = []

    def ask(self, payload: Mapping[str, Any], *_: object, note: str, fresh: bool) -> Outcome:
        assert fresh
        self.asked.append(payload)
        self.notes.append(note)
        return Outcome("done", self.verdicts.pop(0).to_json())


HANG = Verdict("HANG", "run", "did not end")


def worse(tokens: int = 3, case: Case | None = None, law: str = "parity") -> Tried:
    problem = case.problem if case else MergeProblem(num_states=2, num_tokens=tokens)
    return Tried(law, problem, dict(zip(SIDES, (WRONG, HANG), strict=True)), case=case)


@pytest.mark.parametrize(
    ("again", "change"),
    [
        ([WRONG, WRONG, WRONG], "worse-failure"),
        ([PASS, WRONG, PASS], "worse-failure"),
        ([WRONG, Verdict("CRASH", "SIGSEGV")], "still-failing"),
        ([HANG], "still-failing"),
        ([Verdict("CRASH", "out of memory"), WRONG, WRONG], "worse-failure"),
        ([Verdict("CRASH", describe_exit(-9)), WRONG, WRONG], "worse-failure"),
    ],
)
def test_a_worse_failure_must_be_the_candidates_alone(
    find: Any,  # noqa: ANN401
    again: list[Verdict],
    change: str,
) -> None:
    """A race gives wrong answers at times, and hangs at others, with either release."""
    baseline, kept = Baseline(*again), list[Compared]()
    (found,) = find(baseline, worse(), keep=kept)
    assert (found.change, found.candidate["status"]) == (change, "HANG")
    assert baseline.verdicts == []
    assert len(set(baseline.notes)) == len(again)  # each is kept in the journal
    (law,) = implementation_json(kept[0])["laws"]
    assert law["changes"] == {change: 1}


@pytest.mark.parametrize(
    ("versions", "change"), [(">=1,<=2", "still-failing"), ("==2", "worse-failure")]
)
def test_a_hang_that_the_ledger_knows_of_both_releases_is_no_worse(
    find: Any,  # noqa: ANN401
    tmp_path: Path,
    versions: str,
    change: str,
) -> None:
    race = Entry(
        "race", NAME, "HANG", {}, "It is a race.", tmp_path / "c", versions={"torch": versions}
    )
    baseline = Baseline(*[WRONG] * (3 * (change == "worse-failure")))
    (found,) = find(baseline, worse(), entries=(race,))
    assert (found.change, found.entry, baseline.verdicts) == (change, "race", [])


@pytest.mark.parametrize("verdict", [WRONG, HANG])
@pytest.mark.parametrize("versions", [">=1,<=2", "==2", "==1"])
@pytest.mark.parametrize("by_chance", [True, False])
def test_what_the_ledger_knows_of_both_releases_is_not_new_with_one(
    find: Any,  # noqa: ANN401
    tmp_path: Path,
    versions: str,
    by_chance: bool,
    verdict: Verdict,
) -> None:
    chance = Entry(
        "chance",
        NAME,
        verdict.status,
        {},
        "It reads any memory.",
        tmp_path / "c",
        versions={"torch": versions},
        by_chance=by_chance,
    )
    candidate, both = Candidate(again=[3]), "<" in versions and by_chance
    (found,) = find(candidate, failure(3, verdict=verdict), entries=(chance,))
    new = {"FAIL": "new-failure", "HANG": "hang"}[verdict.status]
    expected = "known-of-both" if both else new
    # What was mended in the candidate and is seen again there is new.
    assert (found.change, found.entry) == (expected, "" if versions == "==1" else "chance")
    assert CHANGES[found.change].action == ("report" if both else "block")


def test_laws_that_need_what_neither_release_declares_draw_nothing() -> None:
    plan = BumpPlan((), "cpu", PROFILES["quick"], 0, Ledger(()), Path(), Path())
    without, with_it = (
        {law.name for law in laws_to_judge(Surveyed(NAME, "", "merge_state", declares=each), plan)}
        for each in (frozenset[str](), frozenset({"writes_out"}))
    )
    assert with_it - without == {"output_buffers"}


def test_many_failures_of_one_kind_are_looked_at_no_more_often(find: Any) -> None:  # noqa: ANN401
    baseline = Baseline(WRONG, WRONG, WRONG)
    (found,) = find(baseline, *map(worse, range(1, 40)))
    assert (found.change, found.count) == ("worse-failure", 39)
    assert [asked["problem"]["num_tokens"] for asked in baseline.asked] == [1, 2, 3]
    baseline = Baseline(WRONG, HANG)
    (found,) = find(baseline, *map(worse, range(1, 40)))
    assert (found.change, found.count) == ("still-failing", 39)


def test_a_race_under_one_law_excuses_no_hang_under_another(find: Any) -> None:  # noqa: ANN401
    baseline = Baseline(HANG, WRONG, WRONG, WRONG)
    found = find(baseline, worse(1), worse(2), worse(50, law="soak"))
    assert {each.change: each.laws for each in found} == {
        "still-failing": ("parity",),
        "worse-failure": ("soak",),
    }


def test_a_stored_case_is_looked_at_as_it_was_judged(
    find: Any,  # noqa: ANN401
    tmp_path: Path,
) -> None:
    """Whatever modules were chosen, and without the rules that it was found without."""
    case = Case(tmp_path / "c.json", "parity", MergeProblem(), without_rules=("rule",), soak=7)
    for failing in (worse(case=case), replace(failure(1), problem=case.problem, case=case)):
        kept, baseline = list[Compared](), Baseline(HANG)
        find(baseline, failing, keep=kept)
        (asked,) = baseline.asked
        assert asked == case.request(kept[0].addresses[SIDES[0]])
        assert (asked["without_rules"], asked["modules"]) == (["rule"], [])


def test_findings_before_an_error_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def findings_of(_: Context, looked: tuple[Compared, object]) -> tuple[list[str], list[str]]:
        if looked[0].name == "second":
            raise MachineError(FULL)
        return [f"a finding of {looked[0].name}"], []

    monkeypatch.setattr(outcomes, "_findings_of", findings_of)
    compared = [Compared(name, "made.up:it", addresses={}) for name in ("first", "second")]
    bench = Bench(cast("Any", SimpleNamespace(threads=1)), {}, Journal(None), Ending())
    examined = examine(compared, Context(bench, {}, {}, ()))
    assert [str(each) for each in examined.findings] == ["a finding of first"]
    assert isinstance(examined.error, MachineError)


def test_times_before_a_lost_device_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(each: Compared, _: Bench) -> Iterator[dict[str, Any]]:
        yield {"name": each.name}
        if each.name == "second":
            raise DeviceLostError(FULL)

    monkeypatch.setattr(steps, "measure", measure)
    compared = [
        Compared(name, "made.up:it", addresses=dict.fromkeys(SIDES, ADDRESS))
        for name in ("first", "second", "third")
    ]
    bench = Bench(cast("Any", None), {}, Journal(None), Ending())
    comparison = Comparison(dict.fromkeys(SIDES, "9"), (), compared=compared)
    timed, error = steps._with_speed(comparison, bench)
    assert [len(each.speeds) for each in timed.compared] == [1, 1, 0]
    assert isinstance(error, DeviceLostError)
