"""Published calls of two releases: what the candidate breaks, mends and loses."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kernelproof.ci.answers.journal import Journal
from kernelproof.ci.bump.behaviour import published
from kernelproof.ci.bump.behaviour.asking import Bench
from kernelproof.ci.bump.behaviour.published import (
    KNOWN,
    compare_published,
    counts_told,
    differences,
)
from kernelproof.ci.bump.behaviour.records import Comparison
from kernelproof.ci.bump.sides.plan import BumpPlan
from kernelproof.ci.bump.sides.releases import SIDES, Release
from kernelproof.ci.published.asking import Asked
from kernelproof.ci.published.including import FAILED, JUDGED, ON_A_CPU, UNSUPPORTED
from kernelproof.ci.reports.published_calls import TITLE
from kernelproof.properties.findings.ledger import Ledger
from kernelproof.properties.findings.report import INTERRUPTED, TIME
from kernelproof.properties.search.ending import EndedError, Ending
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.tests.ci.published.stand_in import FEW, stand_in

RIGHT = "def norm_right(input, weight):\n    return reference(input, weight)"


def answer(*calls: dict[str, Any], begun: Sequence[str] = ()) -> dict[str, Any]:
    """Return what becomes of a release's published calls."""
    return {
        "state": JUDGED,
        "why": "",
        "calls": list(calls),
        "not compiled": {},
        "not begun": list(begun),
        "summary": {},
    }


@dataclass
class Bumped:
    """Two releases on a GPU that is not there, and the bench that compares them."""

    comparison: Comparison
    bench: Bench

    def compared(self, part: str = "") -> Comparison:
        """Compare the published calls of both."""
        return compare_published(self.comparison, self.bench, (90,), part)


@pytest.fixture
def bumped(tmp_path: Path) -> Iterator[Bumped]:
    """Return two releases, and a bench with a journal."""
    ending = Ending()
    plan = BumpPlan((), "cuda", PROFILES["quick"], 0, Ledger(()), tmp_path, tmp_path)
    given = {side: str(tmp_path / side) for side in SIDES}
    releases = {side: Release(given[side], tmp_path, sys.executable, (side,)) for side in SIDES}
    with Journal(tmp_path / "journal", ending) as journal:
        journal.start({}, tell=print)
        yield Bumped(Comparison(given, (90,), releases=releases), Bench(plan, {}, journal, ending))


@pytest.fixture
def comparing(bumped: Bumped, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Comparison]:
    """Compare two releases of which this is found, the baseline's first."""

    def compare(*answers: dict[str, Any], part: str = "") -> Comparison:
        made = dict(zip(SIDES, answers, strict=True))
        monkeypatch.setattr(published, "_judged", lambda side, *_: made[side])
        return bumped.compared(part)

    return compare


def call(state: str = "judged", *broken: str, known: str = "") -> dict[str, Any]:
    """Return a call of a report that breaks these laws."""
    findings = [{"law": law, "why": "wrong", "axes": {}, "known": known} for law in broken]
    return {
        "name": "norm",
        "state": state,
        "why": "no",
        "laws": ["parity", "strides"],
        "findings": findings,
        "accused": [],
    }


CROWDED = {**call("unasked"), "why": "OutOfMemoryError: CUDA out of memory"}
ACCUSED = {**call(), "accused": ["elements: 0: by 3 bounds"]}


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        (call(), call("judged", "parity"), ["new-failure"]),
        (call(), call("ended", "hangs"), ["hang"]),
        (call("ended", "hangs"), call("ended", "hangs"), ["hang-stays"]),
        (call("ended"), call("ended", "hangs"), ["hang"]),
        (call("not compiled"), call("ended", "hangs"), ["hang"]),
        (call("ended", "crashes"), call("ended", "hangs"), ["hang"]),
        (None, call("ended", "hangs"), ["candidate-only-failure"]),
        (call("judged", "parity"), call("judged", "parity"), ["still-failing"]),
        (call("judged", "parity"), call(), ["fixed"]),
        (call("judged", "graph"), call(), []),
        (call("reference only"), call("judged", "parity"), ["candidate-only-failure"]),
        (None, call("judged", "parity"), ["candidate-only-failure"]),
        (call(), call("judged", "graph"), ["candidate-only-failure"]),
        (call(), call("reference only"), ["implementation-lost"]),
        (call(), call("not compiled"), []),
        (call(), CROWDED, []),
        (call(), ACCUSED, ["new-failure"]),
        (call("reference only"), ACCUSED, ["new-failure"]),
        (call("ended"), ACCUSED, ["candidate-only-failure"]),
        (ACCUSED, ACCUSED, ["still-failing"]),
        (ACCUSED, call(), ["fixed"]),
        (call(), call(), []),
    ],
)
def test_the_changes_of_a_call(
    before: dict[str, Any] | None, after: dict[str, Any], changes: list[str]
) -> None:
    old = {"norm": before} if before else {}
    assert [each.change for each in differences(old, {"norm": after}, (90,), {})] == changes


@pytest.mark.parametrize(
    ("baseline", "change"),
    [
        (answer(begun=["norm"]), "hang"),
        ({"state": FAILED, "why": "it cannot be read"}, "hang"),
        (answer(), "candidate-only-failure"),
        ({"state": UNSUPPORTED, "why": "it publishes none"}, "candidate-only-failure"),
    ],
)
def test_a_hang_blocks_unless_the_baseline_does_not_publish_the_call(
    comparing: Callable[..., Comparison], baseline: dict[str, Any], change: str
) -> None:
    hangs = call("ended", "hangs")
    found = comparing(baseline, answer(hangs))
    assert [each.change for each in found.findings] == [change]


def test_a_known_finding_is_known_unless_the_baseline_is_right() -> None:
    wrong = call("judged", "strides", known="read as dense")
    (stays,) = differences({"norm": wrong}, {"norm": wrong}, (), {})
    (new,) = differences({"norm": call()}, {"norm": wrong}, (), {})
    assert (stays.entry, stays.reason) == (KNOWN, "read as dense")
    assert (new.entry, new.reason) == ("", "read as dense")


def test_known_findings_and_others_do_not_hide_each_other() -> None:
    known, new = (call("judged", "strides", known=each) for each in ("read as dense", ""))
    both = {**known, "findings": [*known["findings"], *new["findings"]]}

    def changes(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str]]:
        found = list(differences({"norm": before}, {"norm": after}, (), {}))
        assert len({each.id for each in found}) == len(found)
        return [(each.change, each.reason) for each in found]

    stays = ("still-failing", "read as dense")
    assert changes(known, both) == [("new-failure", ""), stays]
    assert changes(both, both) == [("still-failing", ""), stays]
    assert changes(new, known) == [stays]
    assert changes(both, known) == [stays]
    assert changes(both, call()) == [("fixed", "")]


def test_a_part_that_hangs_is_not_hidden_by_a_wrong_number_there() -> None:
    hangs = {"law": "hangs", "why": "asked for graph: hang", "axes": {}, "known": ""}
    before = {**call("judged", "graph"), "laws": ["parity"]}
    after = {**call("judged", "graph"), "laws": ["parity"]}
    after["findings"] = [*after["findings"], hangs]
    changes = {
        each.change: each.message for each in differences({"norm": before}, {"norm": after}, (), {})
    }
    assert changes == {
        "still-failing": "norm: graph: wrong",
        "hang": "norm: hangs: asked for graph: hang",
    }


def test_releases_are_judged_where_no_flashinfer_is_installed(
    comparing: Callable[..., Comparison], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    found = comparing(answer(call()), answer(call("judged", "parity")))
    assert (found.skipped, [each.change for each in found.findings]) == ({}, ["new-failure"])
    left_out = comparing(answer(), answer(), part="--law")
    assert left_out.skipped == {TITLE: "they do not go with --law"}


def test_what_of_a_release_was_not_judged_is_named(
    comparing: Callable[..., Comparison], tmp_path: Path
) -> None:
    waits, full, short = (
        {**each, "name": name}
        for name, each in (("waits", call("ended")), ("full", CROWDED), ("short", CROWDED))
    )
    before = answer({**call(), "name": "gone"}, {**call(), "name": "late"}, waits)
    after = answer(full, {**short, "state": "ended"}, call("ended", "hangs"), begun=["late"])
    found = comparing(before, {**after, "not compiled": {"gemm": ["late"]}})
    one, two = (f"{TITLE} of {tmp_path / side}" for side in SIDES)
    assert found.skipped == {
        one: "ended: waits (no)",
        two: "modules not compiled: gemm; not begun: late; without memory: full, short;"
        " no longer published: gone, waits",
    }


@pytest.mark.parametrize(
    ("found", "ends", "kept"),
    [
        (answer(call()), False, True),
        (answer(call(), begun=["late"]), True, False),
        (answer({**call("ended"), "why": "cut short"}), True, False),
        ({"state": FAILED, "why": "the worker pool is closed"}, False, False),
        ({"state": UNSUPPORTED, "why": "it publishes none"}, False, True),
    ],
)
def test_a_run_that_goes_on_asks_again_what_was_not_judged_as_a_whole(
    bumped: Bumped,
    monkeypatch: pytest.MonkeyPatch,
    found: dict[str, Any],
    *,
    ends: bool,
    kept: bool,
) -> None:
    judged = []

    def judge(asked: Asked, *_: object) -> dict[str, Any]:
        judged.append(asked)
        if ends:
            asked.ending.end(TIME)
        return found

    monkeypatch.setattr(published, "judge_part", judge)
    first = bumped.compared()
    bumped.bench.journal.start({}, resume=True, tell=print)
    again = bumped.compared()
    assert len(judged) == (1 if kept else 2) * len(SIDES)
    assert (again.published, again.skipped) == (first.published, first.skipped)


def test_a_signal_costs_no_finding(bumped: Bumped, monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(asked: Asked, *_: object) -> dict[str, Any]:
        bumped.bench.ending.end(INTERRUPTED)
        bumped.bench.ending.stop()
        asked.ending.end(TIME)
        return answer(call("judged", "parity"), begun=["late"])

    monkeypatch.setattr(published, "judge_part", judge)
    found = bumped.compared()
    assert [each.change for each in found.findings] == ["still-failing"]
    assert list(found.skipped.values()) == ["not begun: late"] * len(SIDES)
    with pytest.raises(EndedError):
        bumped.compared()


def test_a_replay_names_what_the_command_takes(
    bumped: Bumped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flashinfer_python-9.9.1.dist-info").mkdir()
    elsewhere = Release(str(tmp_path), tmp_path, sys.executable, ())
    of_python = Release(sys.executable, tmp_path, sys.executable, ())
    monkeypatch.setattr(published, "judge_part", lambda *_: answer(call("judged", "parity")))
    bumped.comparison = replace(
        bumped.comparison, releases=dict(zip(SIDES, (elsewhere, of_python), strict=True))
    )
    (found,) = bumped.compared().findings
    assert found.replay == {SIDES[0]: "kernelproof published 9.9.1 --device cuda --seed 0 norm"}


def test_both_releases_are_judged_and_the_journal_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {SIDES[0]: FEW, SIDES[1]: FEW.replace(RIGHT, f"{RIGHT} * 1.02")}
    sources[SIDES[1]] = sources[SIDES[1]].replace("reference(input, weight) + 0.009", "input * 0")
    releases = {}
    for side, calls in sources.items():
        (tmp_path / side).mkdir()
        path = (stand_in(tmp_path / side, calls), *sys.path)
        releases[side] = Release(side, tmp_path / side, sys.executable, path)
    given = {side: side for side in SIDES}
    comparison = Comparison(given, ("cpu",), releases=releases)
    ending = Ending()
    plan = BumpPlan((), "cpu", PROFILES["quick"], 0, Ledger(()), tmp_path, tmp_path)
    with Journal(tmp_path / "journal", ending) as journal:
        bench = Bench(plan, {}, journal, ending)
        left_out = compare_published(comparison, bench, (), "")
        assert left_out.skipped == {TITLE: ON_A_CPU}
        monkeypatch.setattr(published, "without", lambda *_: {})
        journal.start({}, resume=False, tell=print)
        found = compare_published(comparison, bench, ("cpu",), "")
        journal.start({}, resume=True, tell=print)
        again = compare_published(comparison, bench, ("cpu",), "")
    assert journal.remembered == len(SIDES)
    assert again.findings == found.findings
    assert {(each.change, each.subject) for each in found.findings} == {
        ("new-failure", "published/norm_right"),
        ("still-failing", "published/norm_code_off"),
        ("still-failing", "published/norm_offset"),
    }
    command = f"kernelproof published {SIDES[0]} --device cpu --seed 0"
    assert all(each.replay[SIDES[0]].startswith(f"{command} norm_") for each in found.findings)
    told = dict(counts_told(found.published))
    assert told[SIDES[0]].startswith("5 judged by FlashInfer's own function; 2 new findings")
    assert told[SIDES[1]].endswith("3 new findings, 0 known")
