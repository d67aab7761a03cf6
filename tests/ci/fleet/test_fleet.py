"""A fleet without Ray: units one after another in this process, and their report."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelproof.ci.answers.identity import plan_identity
from kernelproof.ci.answers.journal import Journal, JournalError
from kernelproof.ci.fleet import command
from kernelproof.ci.fleet.fleet import Fleet, PlaceQueue
from kernelproof.ci.fleet.ray_machines import RayMachines
from kernelproof.ci.fleet.units import Event, Job, Unit, UnitResult, Work, run_unit
from kernelproof.properties.findings.cases import CaseWriter
from kernelproof.properties.findings.ledger import Ledger
from kernelproof.properties.findings.report import (
    Finding,
    ImplementationReport,
    LawReport,
    RunReport,
)
from kernelproof.properties.search.engine import Run
from kernelproof.properties.search.plan import Learned, Part, Plan, laws_planned
from kernelproof.properties.search.progress import Progress
from kernelproof.properties.space.axes import Axes
from kernelproof.properties.space.profiles import Cost, Profile
from kernelproof.properties.verdicts.comparison import fail
from kernelproof.reference import MergeProblem

SUBJECTS = Path(__file__).parents[2] / "properties" / "engine_subjects.py"
TINY = Profile("tiny", problems=8, max_work=20_000, shrink_seconds=120.0, seconds=600.0)
CLOCK = ("seconds", "build_seconds", "call_seconds", "respawns")
"""Fields of a report that depend on the clock, or on how many processes there were."""
LAWS = ("parity", "repeated_calls", "page_relabelling", "split_kv")


class HereInTurn(RayMachines):
    """Machines that are this process, one unit at a time."""

    def __init__(self, chips: Sequence[str] = ("cpu",), most: int = 1_000) -> None:
        self.chips, self._most = chips, most
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self.ran: list[Unit] = []

    def start(self, job: Job) -> None:
        self._job = job

    def places(self, chip: str, node: str = "") -> int:
        del chip, node
        return 1

    def carry_out(self, unit: Unit, beside: int) -> UnitResult | None:
        del beside
        with self._lock:
            if len(self.ran) == self._most:
                raise KeyboardInterrupt
            self.ran.append(unit)
            return self.run(unit)

    def run(self, unit: Unit) -> UnitResult:
        return run_unit(self._job, unit, Progress())

    def events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def end(self, why: str) -> None:
        del why

    def leave(self, node: str) -> None:
        del node

    def close(self) -> None:
        pass


def subject(name: str) -> str:
    return f"{SUBJECTS}:{name}"


def without_clock(value: Any) -> Any:  # noqa: ANN401  JSON
    """Return JSON without what the clock decides."""
    if isinstance(value, dict):
        return {name: without_clock(each) for name, each in value.items() if name not in CLOCK}
    return [without_clock(each) for each in value] if isinstance(value, list) else value


def results(report: RunReport) -> Any:  # noqa: ANN401  JSON
    """Return what a run has found, without what the clock decides."""
    each = [
        [one.to_json(), [found.to_json() for found in one.findings]]
        for one in report.implementations
    ]
    return without_clock([report.profile, report.seed, report.target, each])


def journal_of(folder: Path, plan: Plan, *, resume: bool = False) -> Journal:
    """Return the journal of a run in a folder; the run before it no longer holds it."""
    journal = Journal(folder / "journal.jsonl", flag="--cases")
    journal.start(plan_identity(plan), resume=resume)
    return journal


NAMES = ("honest_attention", "wrong_from_five", "absent")


def plan_of(*names: str, **options: Any) -> Plan:  # noqa: ANN401  a plan's
    fast = Cost("fast", 1.0, TINY.max_work)
    costs = dict.fromkeys(("honest", "wrong-from-five", "always-causal", "wrong-twice"), fast)
    return Plan([subject(name) for name in names], TINY, costs=costs, jobs=1, laws=LAWS, **options)


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelproof.ci.fleet.units.UNIT_SECONDS", 0.01)


@pytest.mark.usefixtures("small_units")
def test_a_report_of_units_is_that_of_one_process(tmp_path: Path) -> None:
    alone = Run(plan_of(*NAMES)).execute()
    assert len(alone.findings) > 1
    plan, machines = plan_of(*NAMES), HereInTurn()
    with journal_of(tmp_path, plan) as journal:
        report = Fleet(plan, machines, journal).execute()
    assert results(report) == results(alone)
    assert {unit.number for unit in machines.ran} == {0, 1, 2, 3}
    # All of it is in the journal: whoever goes on from there runs nothing.
    again = HereInTurn(most=0)
    with journal_of(tmp_path, plan, resume=True) as journal:
        resumed = Fleet(plan, again, journal).execute()
    assert results(resumed) == results(alone)


class MadeUp(HereInTurn):
    """Machines whose units end at once, as a test says."""

    def __init__(
        self, chips: Sequence[str] = ("cpu",), broken: str = "", most: int = 1_000
    ) -> None:
        super().__init__(chips, most)
        self._broken = broken
        self.left: list[str] = []

    def run(self, unit: Unit) -> UnitResult:
        plan = replace(self._job.plan, part=Part(unit.laws, not unit.number))
        laws = [LawReport(law.name, judged=5) for law in laws_planned(plan, "merge_state")]
        report = ImplementationReport("made-up", unit.implementation, "merge_state", laws=laws)
        report.declared = {"tile": 0, "split": 0}
        found = any(law.law == self._broken for law in laws)
        for law in laws:
            if law.law == self._broken:
                law.finding = Finding("made-up", law.law, fail("numeric", "off"), MergeProblem())
        learned = Learned((MergeProblem(),)) if found and not unit.learned.smallest else Learned()
        run = RunReport("tiny", 0, {"device": "cpu"}, [report])
        if (unit.chip, len(self.ran)) == ("lost", 1):
            run.lost = "the device is gone"
        return UnitResult(run, learned, Axes("merge_state", {}, 1), node=f"node of {unit.chip}")

    def leave(self, node: str) -> None:
        self.left.append(node)


def made_up_plan(**options: Any) -> Plan:  # noqa: ANN401  a plan's
    return Plan(["m:made_up"], TINY, **options)


def test_units_after_one_that_finds_something_run_again_and_know_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [law.name for law in laws_planned(made_up_plan(), "merge_state")]
    cut = [(names[-3],), (names[-2],), (names[-1],)]
    monkeypatch.setattr("kernelproof.ci.fleet.units.later_laws", lambda *_: cut)
    machines = MadeUp(broken=names[-2])
    (report,) = Fleet(made_up_plan(), machines).execute().implementations
    assert [unit.number for unit in machines.ran] == [0, 1, 2, 3, 3]
    assert [bool(unit.learned.smallest) for unit in machines.ran] == [False] * 4 + [True]
    assert [law.law for law in report.laws if law.judged][-3:] == names[-3:]


def test_what_comes_late_of_a_unit_that_is_to_begin_again_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = made_up_plan()
    names = [law.name for law in laws_planned(plan, "merge_state")]
    cut = [(names[-3],), (names[-2],), (names[-1],)]
    monkeypatch.setattr("kernelproof.ci.fleet.units.later_laws", lambda *_: cut)
    work, nothing = Work("cpu", "m:made_up", plan), Learned()

    def taken(unit: Unit, learned: Learned = nothing) -> bool:
        report = ImplementationReport("made-up", "m:made_up", operation="merge_state")
        report.laws = [LawReport(name) for name in unit.laws or names[:1]]
        return work.take(unit, UnitResult(RunReport("tiny", 0, {}, [report]), learned)) is not None

    (whole,) = work.ready()
    assert taken(whole)
    first, _, third = work.ready()
    assert taken(first, Learned((MergeProblem(),)))
    (second,) = work.ready()
    assert not taken(third)
    assert taken(second)
    (third,) = work.ready()
    assert third.learned.smallest
    assert taken(third)


def test_a_chip_has_its_own_report_and_all_have_one() -> None:
    fleet = Fleet(made_up_plan(), MadeUp(["sm90", "sm100"]))
    report = fleet.execute()
    assert [each.name for each in report.implementations] == ["made-up on sm90", "made-up on sm100"]
    assert [each.name for each in fleet.of_chip("sm90").implementations] == ["made-up"]
    assert all(each.judged for each in report.implementations)


@pytest.mark.parametrize(("chips", "on"), [(["sm90"], ""), (["sm90", "sm100"], " on {}")])
def test_two_kernels_of_one_name_have_their_references_in_their_names(
    chips: list[str], on: str
) -> None:
    plan = replace(made_up_plan(), implementations=["m:made_up", "n:made_up"])
    shown: set[str] = set()

    class Shown(Progress):
        def law_done(self, report: ImplementationReport, law: LawReport) -> None:
            del law
            shown.add(report.name)

    fleet = Fleet(plan, MadeUp(chips, broken="parity"))
    fleet.progress = Shown()
    report = fleet.execute()
    names = [f"made-up ({module}:made_up)" for module in "mn"]
    expected = [name + on.format(chip) for chip in chips for name in names]
    assert [each.name for each in report.implementations] == expected
    assert {finding.implementation for finding in report.findings} == set(names)
    assert [each.name for each in fleet.of_chip("sm90").implementations] == names
    assert len(shown) == len(expected)


def test_what_each_chip_has_found_is_a_case_of_its_own(tmp_path: Path) -> None:
    report = Fleet(made_up_plan(), MadeUp(["sm90", "sm100"], broken="parity")).execute()
    CaseWriter(tmp_path, None, Ledger()).write_all(report)
    names = [path.name for path in sorted(tmp_path.iterdir())]
    assert [name[: name.index("-parity-")] for name in names] == [
        "made-up-on-sm100",
        "made-up-on-sm90",
    ]
    assert len({finding.replay for finding in report.findings}) == 2


def test_a_report_says_what_units_took() -> None:
    fleet = Fleet(made_up_plan(), MadeUp(["sm90", "lost"]))
    fleet.execute()
    timing = fleet.timing()
    assert timing["places"] == {"sm90": 1, "lost": 1}
    assert [each["number"] for each in timing["units"] if each["chip"] == "sm90"] == [0, 1]
    assert all(each["seconds"] >= 0 for each in timing["units"])


def test_a_machine_without_its_device_gets_no_more_units_and_its_unit_runs_elsewhere() -> None:
    machines = MadeUp(["lost"])
    report = Fleet(made_up_plan(), machines).execute()
    assert machines.left == ["node of lost"]
    assert [unit.number for unit in machines.ran][:2] == [0, 0]
    assert not report.lost
    assert all(law.judged for law in report.implementations[0].laws)


class Elsewhere(MadeUp):
    """Machines of which one builds modules; what needs them goes there."""

    def run(self, unit: Unit) -> UnitResult:
        result = super().run(unit)
        result.report.modules = 2
        there = unit.node or unit.implementation == "m:made_up"
        return replace(result, node="a" if there else "b", elsewhere="" if there else "a")


def test_units_run_on_the_machine_that_builds_their_modules() -> None:
    machines = Elsewhere()
    plan = replace(made_up_plan(), implementations=["m:made_up", "m:other"])
    report = Fleet(plan, machines).execute()
    ran = [(unit.implementation[2:], unit.number, unit.node) for unit in machines.ran]
    assert Counter(ran) == {("made_up", 0, ""): 1, ("made_up", 1, "a"): 1, ("other", 0, ""): 1,
                            ("other", 0, "a"): 1, ("other", 1, "a"): 1}  # fmt: skip
    assert all(law.judged for each in report.implementations for law in each.laws)


def test_what_an_interrupted_run_has_learned_is_gone_on_from(tmp_path: Path) -> None:
    plan = made_up_plan()
    with journal_of(tmp_path, plan) as journal:
        assert Fleet(plan, MadeUp(["a", "b"], most=3), journal).execute().ended == "interrupted"
    path = tmp_path / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:-5])  # the third is cut off
    machines = MadeUp(["a", "b"])
    with journal_of(tmp_path, plan, resume=True) as journal:
        Fleet(plan, machines, journal).execute()
    assert len(machines.ran) == 2


def test_a_journal_of_other_machines_is_not_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Chips(HereInTurn):
        def identities(self, chip: str) -> list[Any]:
            return [{"torch": releases[chip]}]

    def begin(*chips: str) -> set[str]:
        monkeypatch.setattr(command, "RayMachines", lambda *_: Chips(chips))
        with command.fleet_at("made-up", plan, tmp_path, resume=True):
            return {path.name for path in (tmp_path / "fleet").iterdir()}

    monkeypatch.setattr(command, "connected", lambda _: nullcontext())
    plan, releases = made_up_plan(), {"sm90": "2.1", "sm100": "2.1"}
    first = begin("sm90")
    assert begin("sm90", "sm100") == first, "a kind of machines may join"
    releases["sm100"] = "2.2"
    assert begin("sm90") == first
    with pytest.raises(JournalError, match=r"machines of sm100 is .*2\.1.*, not .*2\.2"):
        begin("sm100")
    plan = replace(plan, laws=["parity"])
    assert len(begin("sm100")) == 2, "another plan has a journal of its own"


class Busy(HereInTurn):
    """Machines whose units take as long as the run."""

    def __init__(self) -> None:
        super().__init__()
        self._over = threading.Event()

    def carry_out(self, unit: Unit, beside: int) -> UnitResult | None:
        del unit, beside
        self._over.wait()
        raise CancelledError

    def close(self) -> None:
        self._over.set()


def test_what_has_not_ended_when_the_time_is_over_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kernelproof.ci.fleet.fleet.GRACE_SECONDS", 0.1)
    report = Fleet(made_up_plan(seconds=0.1), Busy()).execute()
    assert report.ended == "time"
    assert report.implementations[0].coverage.gaps


def test_units_that_need_a_machine_wait_for_it_and_hold_up_no_other() -> None:
    class Two(HereInTurn):
        def places(self, chip: str, node: str = "") -> int:
            del chip
            return 1 if node else 2

    queue = PlaceQueue(Two(["sm90", "sm100"]))
    for number, owner in enumerate(["sm90 a", "sm90 a", "sm90 ", "sm90 b", "sm100 b"]):
        queue.put(owner, (number,), (Future(), lambda: None))

    def taken() -> list[str]:
        return [each.owner for each in iter(queue.take, None)]

    assert taken() == ["sm90 a", "sm90 ", "sm100 b"], "two places, one of them a's"
    queue.end("sm90 ", 1.0)
    assert taken() == ["sm90 b"]
    queue.end("sm90 b", 1.0)
    assert taken() == []
    queue.end("sm90 a", 1.0)
    assert taken() == ["sm90 a"]


def test_a_chip_without_machines_lets_no_run_wait() -> None:
    class Gone(HereInTurn):
        def places(self, chip: str, node: str = "") -> int:
            del chip, node
            return int(not self.ran)

        def carry_out(self, unit: Unit, beside: int) -> UnitResult | None:
            del beside
            self.ran.append(unit)
            return None

    report = Fleet(made_up_plan(), Gone(["sm100"])).execute()
    assert report.lost == "sm100: its last machine is gone"


def test_a_run_that_goes_on_reports_the_first_finding_only(tmp_path: Path) -> None:
    plan = replace(made_up_plan(), implementations=["m:made_up", "n:made_up"])
    with journal_of(tmp_path, plan) as journal:
        report = Fleet(plan, MadeUp(broken="parity"), journal).execute()
    assert len(report.findings) == 2
    machines, plan = MadeUp(broken="parity"), replace(plan, exit_first=True)
    with journal_of(tmp_path, plan, resume=True) as journal:
        report = Fleet(plan, machines, journal).execute()
    assert (report.ended, len(report.findings), machines.ran) == ("found", 1, [])


@pytest.mark.parametrize(("entry", "ended"), [(None, "found"), ("known", "")])
def test_a_run_ends_at_its_first_finding_that_no_entry_explains(
    entry: str | None, ended: str
) -> None:
    class Known(MadeUp):
        def run(self, unit: Unit) -> UnitResult:
            result = super().run(unit)
            for finding in result.report.findings:
                finding.entry = entry
            return result

    machines = Known(broken="parity")
    report = Fleet(made_up_plan(exit_first=True), machines).execute()
    assert (report.ended, len(report.findings)) == (ended, 1)
    assert ({unit.number for unit in machines.ran} == {0}) == bool(ended)


def test_a_finding_that_a_unit_under_way_tells_ends_a_run() -> None:
    class Telling(MadeUp):
        def run(self, unit: Unit) -> UnitResult:
            result = super().run(unit)
            self._events += [
                Event(unit, "law_done", (result.report, law)) for law in result.report.laws
            ]
            return result

    machines = Telling(broken="parity")
    report = Fleet(made_up_plan(exit_first=True), machines).execute()
    assert (report.ended, len(report.findings)) == ("found", 1)
    assert {unit.number for unit in machines.ran} == {0}


def test_laws_with_nothing_to_judge_are_not_owed_when_a_run_ends_early() -> None:
    class Declaring(MadeUp):
        def run(self, unit: Unit) -> UnitResult:
            result = super().run(unit)
            result.report.declared["declares"] = []
            return result

    plan = made_up_plan(exit_first=True)
    (report,) = Fleet(plan, Declaring(broken="parity")).execute().implementations
    planned = {law.name: law for law in laws_planned(plan, "merge_state")}
    unjudged = {law.law: law for law in report.laws if not law.judged}
    needing = {name for name in unjudged if planned[name].needs}
    assert needing
    assert needing == {name for name, law in unjudged.items() if law.ended == "idle"}
    assert all(unjudged[name].floor == 0 for name in needing)
    assert all(unjudged[name].ended == "stopped" for name in unjudged.keys() - needing)
