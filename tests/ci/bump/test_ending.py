"""A comparison judges while it builds, and whatever ends it, it tells what it has learned."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from kernelproof.ci.answers.journal import Journal
from kernelproof.ci.bump import command
from kernelproof.ci.bump.behaviour import watching
from kernelproof.ci.bump.behaviour.asking import Bench
from kernelproof.ci.bump.behaviour.building import Builders, Wanted, ordered_builds
from kernelproof.ci.bump.behaviour.judging import Asking, Judging, judge
from kernelproof.ci.bump.behaviour.numbers import cuts_of, gap, matters, rows_of
from kernelproof.ci.bump.behaviour.records import (
    DEAR,
    TIME,
    UNREACHED,
    Compared,
    Planned,
    Tried,
)
from kernelproof.ci.bump.behaviour.watching import Count
from kernelproof.ci.bump.command import Request, compare
from kernelproof.ci.bump.report import contents
from kernelproof.ci.bump.sides.plan import BumpPlan
from kernelproof.ci.bump.sides.releases import SIDES
from kernelproof.ci.bump.verdicts.policy import DEFAULT
from kernelproof.ci.bump.verdicts.verdict import decide
from kernelproof.ci.cli import main
from kernelproof.ci.console import live
from kernelproof.ci.console.errors import MachineError
from kernelproof.ci.console.live import MOST_SHOWN
from kernelproof.properties.findings.ledger import Ledger
from kernelproof.properties.findings.report import TERMINATED
from kernelproof.properties.search.ending import EndedError, Ending
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.properties.verdicts.verdict import PASS
from kernelproof.properties.worker.requests import Address, DeviceLostError
from kernelproof.reference import MergeProblem

# Both are wrong of no keys with the candidate. What is compiled waits in its first call.
SUBJECTS = """
import time
from pathlib import Path
import torch
import flashinfer
from kernelproof.impl import implementation

HERE, PATIENCE = Path(__file__).parent, 240.0
waited = False


def right(inputs):
    lses = inputs.lses.double()
    lse = torch.logsumexp(lses, dim=0)
    empty = lse.isneginf() & (not flashinfer.BROKEN)
    weights = torch.exp(lses - torch.where(empty, 0.0, lse)).unsqueeze(-1)
    out = (weights * inputs.outs.double()).sum(dim=0)
    return out.to(inputs.out_dtype), lse.float()


@implementation("merge_state", name="plain")
def plain(inputs):
    (HERE / "judged").touch()
    return right(inputs)


@implementation("merge_state", name="compiled", build_ahead=True,
                compile_key=lambda problem: problem.dtype)
def compiled(inputs):
    global waited
    until = time.monotonic() + PATIENCE
    while not waited and not (HERE / FILE).exists():
        time.sleep(0.01)
        if time.monotonic() > until:
            (HERE / "in-vain").touch()
            break
    waited = True
    return right(inputs)
"""
COMPARED = [
    "--profile", "quick", "--law", "parity", "--implementation", "subjects.py:compiled",
    "--implementation", "subjects.py:plain", "--part", "behaviour", "--modules", "2",
    "--jobs", "1", "--sm", "cpu",
]  # fmt: skip


@pytest.fixture
def here(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    made_up_release: Callable[[Path, str, str], None],
) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, version, broken in (("old", "9.9.1", False), ("new", "9.9.2", True)):
        code = f"__version__, BROKEN = {version!r}, {broken}\n"
        made_up_release(tmp_path / name, version, code)
    return tmp_path


def compiled_after(here: Path, file: str) -> None:
    """Write what is compared: the compiled one's modules are done once there is this file."""
    (here / "subjects.py").write_text(SUBJECTS.replace("FILE", repr(file)))


def read(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text())
    return report


@pytest.mark.skipif(sys.platform != "linux", reason="looks into the journal of another process")
def test_problems_are_judged_while_modules_are_compiled_and_a_signal_then_leaves_a_report(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    settled: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    compiled_after(here, "go")
    words = [sys.executable, "-m", "kernelproof", "gate", "--baseline", "old", "--candidate", "new"]
    journal = here / ".kernelproof" / "gate" / "old-new-cpu.jsonl"
    with (here / "log").open("wb") as log:
        process = subprocess.Popen(
            [*words, *COMPARED, "--json", "ended.json"], cwd=here, stdout=log, stderr=log
        )
        # A finding, and modules that were chosen.
        while process.poll() is None and not (
            journal.exists()
            and b'"nan"' in journal.read_bytes()
            and b" of them, about" in (here / "log").read_bytes()
        ):
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 143, (here / "log").read_text()
    assert not (here / "in-vain").exists()
    ended = read(here / "ended.json")
    assert (ended["verdict"], ended["exit_code"]) == ("undecided", 143)
    assert "ended by SIGTERM: --resume goes on from here" in ended["message"]
    assert [each["subject"] for each in ended["findings"]] == ["subjects.py:plain"]
    (cut,) = [each for each in ended["machines"][0]["cut"] if each["name"].endswith("compiled")]
    assert (cut["code"], cut["judged"], cut["modules"], cut["built"]) == ("signal", 0, 2, 0)
    assert any(
        each["what"] == "2 of about 2 modules: subjects.py:compiled (2 of 2)"
        for each in ended["machines"][0]["not_tested"]
    )

    (here / "go").touch()
    assert main(["bump", "old", "new", *COMPARED, "--json", "again.json", "--resume"]) == 1
    again = read(here / "again.json")

    compiled_after(here, "judged")
    (here / "judged").unlink()
    capsys.readouterr()
    whole = ["--json", "whole.json", "--journal", "other.jsonl"]
    assert main(["bump", "old", "new", *COMPARED, *whole]) == 1
    assert not (here / "in-vain").exists()  # what needs no module was judged meanwhile
    undisturbed = read(here / "whole.json")
    order = [each["subject"] for each in undisturbed["findings"]]
    assert order == ["subjects.py:compiled", "subjects.py:plain"]  # as they were named
    assert undisturbed["machines"][0]["cut"] == []
    said = capsys.readouterr().err
    assert "1 need no module, 1 need 2 modules of each release" in said
    assert "problems will be judged with both releases, without a limit of time" in said
    assert settled(again) == settled(undisturbed)


@pytest.mark.parametrize("error", [DeviceLostError, MachineError])
def test_a_device_that_is_lost_leaves_what_was_learned(
    error: type[Exception], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Likewise a journal whose disk is full."""
    compiled_after(here, "judged")
    left = iter(range(6))

    def judge_some(*asked: Any) -> Tried:  # noqa: ANN401  handed on
        if next(left, None) is None:
            message = "cuda did not come back"
            raise error(message)
        return judge(*asked)

    monkeypatch.setattr("kernelproof.ci.bump.behaviour.judging.judge", judge_some)
    alone = ["--implementation", "subjects.py:plain", *COMPARED[:4], *COMPARED[8:]]
    assert main(["bump", "old", "new", *alone, "--seed", "1", "--json", "r.json"]) == 3
    report = read(here / "r.json")
    assert (report["verdict"], report["machines"][0]["judged"]) == ("undecided", 6)
    assert "ended early: cuda did not come back" in report["message"]
    assert [each["change"] for each in report["findings"]] == ["new-failure"]
    (cut,) = report["machines"][0]["cut"]
    assert (cut["code"], cut["judged"]) == ("lost", 6)


def test_a_device_that_is_lost_while_failures_are_made_small_is_told_with_the_answers(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_after(here, "judged")

    def lose(*_: object) -> None:
        message = "cuda did not come back"
        raise DeviceLostError(message)

    monkeypatch.setattr("kernelproof.properties.search.shrinking.simplify", lose)
    alone = ["--implementation", "subjects.py:plain", *COMPARED[:4], *COMPARED[8:]]
    assert main(["bump", "old", "new", *alone, "--json", "r.json"]) == 3
    report = read(here / "r.json")
    assert (report["verdict"], report["findings"]) == ("undecided", [])
    assert "ended early: cuda did not come back" in report["message"]
    assert report["machines"][0]["judged"] > 6


def test_a_comparison_without_time_is_undecided_and_says_so(here: Path) -> None:
    compiled_after(here, "judged")
    assert main(["bump", "old", "new", *COMPARED, "--minutes", "0.0001", "--json", "r.json"]) == 4
    report = read(here / "r.json")
    assert (report["verdict"], report["exit_code"]) == ("undecided", 4)
    assert "(--minutes 0.0001)" in report["message"]


def test_after_the_end_only_what_is_known_is_answered(tmp_path: Path) -> None:
    ending = Ending(60e-9)
    ending.allot(1e12)
    with Journal(tmp_path / "j.jsonl", ending) as journal:
        assert journal.ask({"ask": 1}, lambda: "new") == "new"
        ending.allot(1.0)
        with pytest.raises(EndedError):
            journal.ask({"ask": 2}, lambda: "new")
        assert journal.ask({"ask": 1}, lambda: "other") == "new"


def test_what_the_end_has_killed_is_no_answer(tmp_path: Path) -> None:
    ending = Ending()

    def answer() -> str:
        ending.lose("somebody ended it")
        return "killed"

    with Journal(tmp_path / "j.jsonl", ending) as journal:
        with pytest.raises(EndedError, match="somebody"):
            journal.ask({"ask": 1}, answer)
        assert journal.answered == 0


def test_the_end_closes_what_is_open_and_what_is_opened_later() -> None:
    ending, closed = Ending(), list[str]()
    with ending.closing(lambda: closed.append("open")):
        ending.lose("it is over")
        with ending.closing(lambda: closed.append("late")):
            pass
        ending.lose("again")
    assert closed == ["open", "late"]
    assert ending.lost == "it is over"


def test_what_has_had_its_share_of_the_time_is_closed_and_the_rest_goes_on() -> None:
    ending, closed = Ending(600.0), threading.Event()
    with ending.watched(), ending.closing(closed.set, 1e-9):
        assert closed.wait(60)
        assert not ending.over


def test_a_signal_counts_before_anybody_has_noticed_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ending, "watched", lambda _: nullcontext())
    compiled_after(here, "judged")
    ending = Ending()
    ending.end(TERMINATED)
    report, _ = compare(Request("old", "new", "gate", parts=("surface",)), ending)
    assert not ending.stopped()
    assert (report["verdict"], report["exit_code"]) == ("undecided", 143)
    assert "ended by SIGTERM: --resume goes on from here" in report["message"]


def test_a_signal_after_the_last_step_ends_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_after(here, "judged")
    ending, request = Ending(), Request("old", "new", "gate", parts=("surface",))
    undisturbed, _ = compare(request, Ending())

    def to_json(*learned: Any, **more: Any) -> dict[str, Any]:  # noqa: ANN401  handed on
        ending.end(TERMINATED)
        return contents.to_json(*learned, **more)

    monkeypatch.setattr(command, "to_json", to_json)
    report, _ = compare(request, ending)
    assert report["message"] == undisturbed["message"]
    assert report["exit_code"] == undisturbed["exit_code"]
    assert "undecided" != report["verdict"] == undisturbed["verdict"]


READING = """
import os, signal, subprocess, sys
from kernelproof.ci.bump.sides.plan import end_of
from kernelproof.ci.console.signals import ended_by_signals
from kernelproof.properties.isolation.spawning import kill_children
from kernelproof.properties.search.ending import Ending

ending = Ending()
with ended_by_signals(ending.end), ending.watched(), ending.closing(kill_children):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    os.kill(os.getpid(), signal.SIGTERM)
    child.wait()
sys.exit(end_of(ending)[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_signal_ends_what_a_comparison_waits_for_before_there_are_workers() -> None:
    assert subprocess.run([sys.executable, "-c", READING], check=False).returncode == 143


def test_problems_wait_for_their_modules_and_in_the_end_for_none() -> None:
    order: list[str] = []
    bench = Bench(plan(), {}, Journal(None), Ending())
    judging = Judging(bench, Builders({}, bench), lambda tried, _: order.append(tried.law))

    def asking(found: Planned, number: int, module: str | None = None) -> Asking:
        tried = Tried(f"{found.name} {number}", MergeProblem(num_states=2), {})
        return judging._asking(found, (0, 0, number), lambda *_: tried, module)

    free, built = Planned("free", ""), Planned("built", "")

    def submit(*asked: Asking) -> None:
        judging._scheduler.post(judging._subject(), partial(judging._submit, asked))

    def prepare(_: object) -> None:
        submit(*(asking(built, number, f"module {number}") for number in range(2)), asking(free, 0))
        judging._release(Wanted(built, "module 1", MergeProblem(num_states=2), 1, {}))
        submit(asking(built, 2, "module 1"))

    judging._prepare = prepare  # type: ignore[method-assign]
    judging.run()
    assert judging.error is None
    # What could not be built is left to the laws.
    assert sorted(order) == ["built 0", "built 1", "built 2", "free 0"]
    assert order.index("built 1") < order.index("built 2")


def plan() -> BumpPlan:
    return BumpPlan((), "cpu", PROFILES["quick"], 0, Ledger(()), Path("cases"), Path("tensors"))


def test_a_library_is_compiled_once_for_all_that_need_it_the_first_of_each_before_any_second() -> (
    None
):
    problem = MergeProblem(num_states=2, num_tokens=1)
    address = Address("made.up:it", None, "cpu")

    def wanted(name: str, library: str, turn: int = 0, *, minutes: float = 1.0) -> Wanted:
        found = Planned(name, "", build_minutes=minutes, addresses={SIDES[0]: address})
        return Wanted(found, "key", problem, turn, {SIDES[0]: (library, library == "there")})

    builds = ordered_builds(
        [
            wanted("a", "one"),
            wanted("a", "two", turn=1),
            wanted("b", "one"),
            wanted("c", "three", minutes=0.5),
            wanted("d", "there", turn=1),
            wanted("e", ""),
            wanted("f", ""),
        ]
    )
    assert [
        ("".join(each.found.name for each in build.wanted), build.exists) for build in builds
    ] == [
        ("c", False),
        ("ab", False),
        ("e", False),
        ("f", False),
        ("a", False),
        ("d", True),
    ]


def cut_off(name: str, *laws: str, left_out: str = "") -> Compared:
    """Make an implementation of which two laws were to judge a problem each, and these did."""
    addresses = {side: Address("made.up:it", None, "cpu") for side in SIDES}
    tried = [Tried(law, MergeProblem(2, 1), dict.fromkeys(SIDES, PASS)) for law in laws]
    planned = {"": 0, "parity": 2, "soak": 1}
    return Compared(name, "", addresses=addresses, tried=tried, planned=planned, left_out=left_out)


def test_a_verdict_lacks_laws_that_judged_nothing_but_not_what_is_too_dear() -> None:
    ending = Ending(120.0)
    in_part, lacking = cut_off("in part", "parity", "soak"), cut_off("lacking", "parity")
    dear, unasked = cut_off("dear", left_out=DEAR), cut_off("unasked", left_out=UNREACHED)
    assert gap(cuts_of([in_part, dear], ending), ending) == ""
    cuts = cuts_of([in_part, lacking, dear, unasked], ending)
    assert [(each.name, each.code, each.laws) for each in cuts] == [
        ("in part", "time", ()),
        ("lacking", "time", ("soak",)),
        ("dear", "dear", ("parity", "soak")),
        ("unasked", "unreached", ("parity", "soak")),
    ]
    assert "2 implementations: lacking, unasked;" in gap(cuts, ending)
    many = cuts_of([cut_off(name, left_out=UNREACHED) for name in "abcde"], ending)
    assert "5 implementations: a, b, c and 2 more;" in gap(many, ending)
    rows = {each["what"]: each["why"] for each in rows_of(cuts, ending)}
    assert "3 of about 6 problems: in part (1 of 3), lacking (2 of 3)" in rows
    assert "compiled within --minutes 2" in rows["dear: its modules"]
    (resumed,) = rows_of(cuts_of([dear], Ending()), Ending())  # without --minutes
    assert "compiled within the time of a run" in resumed["why"]


def test_a_verdict_lacks_what_others_left_no_time_for() -> None:
    ending = Ending(120.0)
    (cut,) = cuts_of([cut_off("crowded", left_out=TIME)], ending)
    assert (cut.code, cut.laws, matters(cut)) == ("time", ("parity", "soak"), True)


def test_whoever_ends_a_comparison_decides_nothing_by_it() -> None:
    def verdict(*, ended: bool) -> tuple[str, int]:
        found = decide([], {90: "run"}, DEFAULT, baseline="9.9.1", ended=ended)
        return found.verdict, found.exit_code

    assert (verdict(ended=False), verdict(ended=True)) == (("bump", 0), ("undecided", 3))


def test_a_count_says_what_is_at_work() -> None:
    count = Count("{done} of {of}, {working} at work")
    assert str(count) == ""
    count.expect(1200)
    count.begin()
    count.begin()
    count.add()
    assert (str(count), count.unfinished) == ("1 of 1,200, 1 at work", True)
    assert count.share == 1 / 1200
    assert Count("").share is None


def test_a_step_that_takes_long_is_shown_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "LEAST_PAUSE", 0.01)
    said, until = "", time.monotonic() + 60.0
    with watching.progress() as watched:
        watched.tell("reading")
        while "still: reading" not in said and time.monotonic() < until:
            said += capfd.readouterr().err
            time.sleep(0.01)
        watched.judged.expect(5)
        while "ran 0 of about 5" not in said and time.monotonic() < until:
            said += capfd.readouterr().err
            time.sleep(0.01)
        watched.found("new-failure  mine")
        said += capfd.readouterr().err
    assert "still: reading" in said
    assert "ran 0 of about 5" in said
    assert "new-failure  mine" in said


@pytest.mark.parametrize("known", [False, True])
def test_a_block_has_the_last_findings_and_a_share_once_all_is_known(
    monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    blocks: list[Callable[[], RenderableType]] = []

    @contextmanager
    def shown(_: Console, block: Callable[[], RenderableType], __: object) -> Iterator[None]:
        blocks.append(block)
        yield

    monkeypatch.setattr(watching, "live", shown)
    monkeypatch.setattr(watching, "has_block", lambda _: True)
    with watching.progress() as watched:
        watched.surveyed.expect(2)
        watched.judged.expect(4)
        watched.judged.add()
        for _ in range(2 if known else 1):
            watched.surveyed.add()
        for number in range(MOST_SHOWN + 3):
            watched.found(f"new-failure  mine{number}")
        out = io.StringIO()
        Console(file=out, width=100).print(blocks[0]())
    text = out.getvalue()
    assert ("25%" in text) == known
    assert "3 earlier findings\nnew-failure  mine3\n" in text
    assert text.count("new-failure") == MOST_SHOWN
