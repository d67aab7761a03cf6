"""Exit codes and reports, from results made by hand."""

from __future__ import annotations

import html
import io
import json
import math
import re
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest

from kernelproof.ci.console.terminal import PLAIN_WIDTH, console
from kernelproof.ci.reports.claims import claims_count
from kernelproof.ci.reports.display import command
from kernelproof.ci.reports.html_report import to_html
from kernelproof.ci.reports.json_report import to_json
from kernelproof.ci.reports.progress import Watch
from kernelproof.ci.reports.run_outline import print_summary, to_junit
from kernelproof.ci.reports.summary import Summary, replayed, summarise
from kernelproof.impl import implementation
from kernelproof.impl.targets.refusal import Refusal
from kernelproof.properties.findings.cases import CaseWriter, loading_name, replay_command
from kernelproof.properties.findings.coverage import Coverage, Gap
from kernelproof.properties.findings.files import dumps, write_text
from kernelproof.properties.findings.ledger import Entry, Ledger, read_case
from kernelproof.properties.findings.report import (
    CorpusReport,
    Finding,
    ImplementationReport,
    LawReport,
    RunReport,
    Separated,
    Separation,
)
from kernelproof.properties.isolation.leftovers import Left
from kernelproof.properties.laws import find_law
from kernelproof.properties.verdicts.text import compact
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import AttentionProblem, MergeProblem

if TYPE_CHECKING:
    from collections.abc import Callable

NASTY = "out[0, 1] is \x1b[31mNaN\x00 <b>&amp; ]]> \ud800 [red]"
BAD = Verdict("FAIL", "nan", NASTY, trace="a\x07trace")
ENTRY = Entry(
    id="merge-empty",
    implementation="mine",
    laws=("merge_identity",),
    status="FAIL",
    where={},
    reason="merging nothing <gives> nothing",
    case=Path("corpus") / "merge-empty.json",
    issue="https://example.org/1",
)
LEDGER = Ledger((ENTRY,))


def finding(law: str = "parity", **changes: Any) -> Finding:  # noqa: ANN401  any field
    made = Finding("mine", law, BAD, MergeProblem(num_tokens=3, empty="all"))
    return replace(made, **changes)


def passing(name: str = "mine", judged: int = 7) -> ImplementationReport:
    return ImplementationReport(
        name, f"kernels:{name}", "merge_state", laws=[LawReport("parity", judged=judged)]
    )


def failing() -> ImplementationReport:
    laws = [
        LawReport("parity", judged=3, finding=finding()),
        LawReport(
            "merge_identity",
            judged=4,
            known=Counter({"merge-empty": 4}),
            finding=finding("merge_identity", entry="merge-empty"),
        ),
        LawReport("merge_union", unsupported=5, vacuous=2),
    ]
    return ImplementationReport("mine", "kernels:mine", "merge_state", laws=laws)


def run(*implementations: ImplementationReport, **changes: Any) -> RunReport:  # noqa: ANN401  any field
    target = {"device": "cpu", "device_name": "x", "torch": "2.13.0", "triton": None}
    report = RunReport("quick", 3, target, list(implementations), seconds=1.25)
    return replace(report, **changes)


def summary(report: RunReport, *, gate: bool = False, failure: str = "") -> Summary:
    return summarise(report, LEDGER, gate=gate, command="kernelproof check x", failure=failure)


UNSUPPORTED = ImplementationReport(
    "other", "kernels:other", "merge_state", refusal=Refusal("needs a GPU", "device")
)
NOT_FOUND = ImplementationReport("a:b", "a:b", error="there is no module 'a'")
NO_ANSWER = ImplementationReport("a:b", "a:b", "merge_state", error="supports failed: boom")
HARNESS = ImplementationReport("a:b", "a:b")
HARNESS.fail("overrun")
OF_A_USER = ImplementationReport("a:b", "a:b", error="the suite failed: a module's own words")
KNOWN = ImplementationReport("mine", "kernels:mine", "merge_state", laws=failing().laws[1:])


@pytest.mark.parametrize(
    ("report", "check", "gate"),
    [
        (run(passing()), 0, 0),
        (run(KNOWN), 0, 0),
        (run(passing(), failing()), 1, 1),
        (run(passing(), UNSUPPORTED), 3, 0),
        (run(failing(), UNSUPPORTED), 1, 1),
        (run(UNSUPPORTED), 3, 3),
        (run(passing(judged=0)), 3, 3),
        (run(), 3, 3),
        (run(passing(), NOT_FOUND), 2, 3),
        (run(failing(), NO_ANSWER), 3, 3),
        (run(passing(), HARNESS), 3, 3),
        (run(failing(), HARNESS), 1, 1),
        (run(passing(), OF_A_USER), 2, 3),
        (run(failing(), lost="cuda did not come back"), 3, 3),
        (run(passing(), ended="interrupted"), 130, 130),
        (run(passing(), ended="terminated"), 143, 143),
    ],
)
def test_exit_codes(report: RunReport, check: int, gate: int) -> None:
    assert summary(report).code == check
    assert summary(report, gate=True).code == gate
    named = {0: "conforming", 1: "nonconforming", 130: "incomplete", 143: "incomplete"}
    assert to_json(summary(report))["verdict"] == named.get(check, "error")


def test_every_report_says_what_an_implementation_needs_of_hidden_keys() -> None:
    claim = 'declares hidden_keys="finite": pages behind every window must hold finite numbers'

    @implementation("paged_attention", name="needs", hidden_keys="finite")
    def needs(_: object) -> None:
        """Do nothing."""

    assert needs.claims[0].startswith(claim)
    report = passing()
    report.declared = {"claims": list(needs.claims)}
    assert replace(report, laws=[]).claims == [], "nothing was judged"
    made = summary(run(report))
    printed = io.StringIO()
    print_summary(console(printed), made)
    assert claim in " ".join(printed.getvalue().split())
    assert to_json(made)["implementations"][0]["claims"] == list(needs.claims)
    assert claim in html.unescape(to_html(made))
    assert claim in html.unescape(to_junit(made))
    with pytest.raises(ValueError, match="hidden_keys is 'none'; it must be one of any, finite"):
        implementation("paged_attention", name="needs", hidden_keys="none")  # type: ignore[arg-type]


@pytest.mark.parametrize("report", [NOT_FOUND, NO_ANSWER])
def test_an_error_names_its_implementation_once(report: ImplementationReport) -> None:
    assert summary(run(report)).sentence.startswith(f"ERROR: a:b: {report.error}; ")


def test_a_failure_of_the_suite_is_no_verdict_on_a_kernel() -> None:
    ended = summary(run(failing()), failure="the suite failed: KeyError: 1")
    assert ended.code == 3
    assert "KeyError" in ended.sentence
    assert to_json(ended)["error"].startswith("the suite failed")


def test_the_json_holds_every_finding() -> None:
    data = json.loads(dumps(to_json(summary(run(failing(), UNSUPPORTED)))))
    assert data["schema"] == "kernelproof/report/1"
    assert (data["judged"], data["unsupported"], data["seconds"]) == (7, 5, 1.25)
    new, known = data["findings"]
    assert (new["law"], new["status"], new["kind"]) == ("parity", "FAIL", "nan")
    assert new["problem"]["empty"] == "all"
    assert (known["status"], known["entry"]) == ("KNOWN", "merge-empty")
    assert known["reason"] == ENTRY.reason
    assert data["known"][0]["count"] == 4
    assert data["implementations"][1]["status"] == "UNSUPPORTED"
    for name in ("profile", "seed", "target", "kernelproof", "date", "command", "device"):
        assert data[name] not in (None, "")


def test_what_was_printed_comes_with_its_finding() -> None:
    said = "assertion \x1b[31mi < n\x00 failed"
    printed = finding(verdict=replace(BAD, printed=f"first\n{said}\n"))
    law = LawReport("parity", judged=3, finding=printed)
    told = summary(run(ImplementationReport("mine", "kernels:mine", "merge_state", laws=[law])))
    out = io.StringIO()
    print_summary(console(out), told)
    shown = "assertion \\x1b[31mi < n\\x00 failed"
    assert f"  printed: {shown}\n" in out.getvalue()
    assert to_json(told)["findings"][0]["printed"] == f"first\n{said}\n"
    assert shown.replace("<", "&lt;") in to_html(told)
    (element,) = ET.fromstring(to_junit(told)).iter("system-out")  # noqa: S314
    assert element.text == f"first\n{shown}\n"


def test_the_worst_ratio_is_the_findings_where_it_has_one() -> None:
    wrong = finding(verdict=Verdict("FAIL", "numeric", "out[0] is off", ratio=4.1e5))
    law = LawReport("parity", judged=3, finding=wrong, passing_ratio=0.8254)
    report = run(ImplementationReport("mine", "kernels:mine", "merge_state", laws=[law]))
    (told,) = to_json(summary(report))["implementations"][0]["laws"]
    assert (told["worst_ratio"], told["passing_ratio"]) == (4.1e5, 0.8254)
    assert to_json(summary(report))["findings"][0]["ratio"] == 4.1e5
    assert ">4.1e+05<" in to_html(summary(report))
    assert 'name="worst_ratio" value="4.1e+05"' in to_junit(summary(report))
    wrong.entry = "merge-empty"
    assert law.worst_ratio == 0.8254
    # Where every bit counts, and for a NaN, no passing ratio stands beside the failure.
    element = {"where": "out[0]", "got": "1", "expected": "2", "bound": "exactly"}
    law.finding = finding(verdict=Verdict("FAIL", "numeric", "out[0] is 1", element=element))
    data = to_json(summary(report))
    assert data["findings"][0]["ratio"] == law.worst_ratio == math.inf
    assert '"worst_ratio": "inf"' in dumps(data)
    assert 'name="worst_ratio" value="inf"' in to_junit(summary(report))
    assert ">inf<" in to_html(summary(report))


def test_findings_with_one_cause_are_shown_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    hang = Verdict("HANG", "run")
    found = (finding(), finding("well_formed"), finding("soak", verdict=hang))
    laws = [LawReport(each.law, judged=3, finding=each) for each in found]
    ended = summary(run(ImplementationReport("mine", "kernels:mine", "merge_state", laws=laws)))
    assert ended.sentence.startswith("NOT CONFORMING: 2 new findings, 0 known")
    one, other = to_json(ended)["findings"]
    assert (one["law"], one["laws"], other["laws"]) == (
        "parity",
        ["parity", "well_formed"],
        ["soak"],
    )
    assert one["cause"] == {"values": {}, "failing": 1, "passing": 0, "others": 0}
    text = printed(ended, monkeypatch)
    assert text.count("FAIL nan  mine  parity, well_formed") == 1
    assert text.count("problem: ") == 2
    page = to_html(ended)
    assert page.count("The same cause shows under 1 other law") == 1
    statement = html.escape(find_law("parity").statement[1:]).replace("&#x27;", "&#39;")
    assert page.count(statement) == 2  # with its finding, and among all laws
    (suite,) = ET.fromstring(to_junit(ended)).findall("testsuite")  # noqa: S314
    assert suite.get("failures") == "3"  # each law keeps its verdict
    failure = suite.findall("testcase")[1].find("failure")
    assert failure is not None
    assert failure.get("message") == "FAIL nan: the same cause as under parity"


def test_every_report_has_what_experiments_found_and_what_nothing_explains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    further = finding(problem=MergeProblem(num_tokens=9), verdict=Verdict("FAIL", "shape", "odd"))
    report = failing()
    cause = Separated({"num_tokens": 9}, [further], failing=2)
    report.separation = Separation([cause], [further, finding(entry="merge-empty")], unexplained=3)
    ended = summary(run(report))
    told = to_json(ended)
    assert [each["unexplained"] for each in told["implementations"]] == [3]
    assert {each["problem"]["num_tokens"] for each in told["findings"]} == {3, 9}
    assert "num_tokens=9" in to_html(ended)
    says = "3 problems failed for no cause that was found in time"
    for text in (to_html(ended), printed(ended, monkeypatch)):
        assert says in " ".join(text.split())
    (suite,) = ET.fromstring(to_junit(ended)).findall("testsuite")  # noqa: S314
    assert suite.get("failures") == "2"
    name = f"parity ({further.problem.id})"
    (case,) = (each for each in suite.iter("testcase") if each.get("name") == name)
    assert "odd" in str(case[0].get("message"))
    assert suite.find("properties/property[@name='unexplained']").get("value") == "3"  # type: ignore[union-attr]


def test_ignored_options_are_named_beside_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "sinks, window_left are ignored: sinks = False moves the oracle's out[0] by 1"
    ignored = Verdict("FAIL", "insensitive", f"{names}; window_left = -1 moves it by 2")
    found = (finding(), finding("sensitivity", verdict=ignored))
    laws = [LawReport(each.law, judged=3, finding=each) for each in found]
    ended = summary(run(ImplementationReport("mine", "kernels:mine", "merge_state", laws=laws)))
    (one,) = to_json(ended)["findings"]
    assert (one["kind"], one["ignored"]) == ("nan", names)
    assert f"  ignored: {names}\n" in printed(ended, monkeypatch)
    escaped = html.escape(names).replace("&#x27;", "&#39;")
    assert f"<strong>Ignored:</strong> {escaped}</p>" in to_html(ended)
    laws.reverse()
    alone = summary(run(ImplementationReport("mine", "kernels:mine", "merge_state", laws=laws[:1])))
    assert to_json(alone)["findings"][0]["ignored"] == ""
    # What moves too little is no option that is ignored.
    message = "sinks = True in place of False moves the oracle's out[0] by 2, ours by 1"
    told: tuple[tuple[list[str], str], ...] = (([], ""), (["sinks"], message))
    for options, shown in told:
        little = Verdict("FAIL", "insensitive", message, ignored=options)
        laws[:] = [
            LawReport(each.law, judged=3, finding=each)
            for each in (finding(), finding("sensitivity", verdict=little))
        ]
        made = ImplementationReport("mine", "kernels:mine", "merge_state", laws=laws)
        assert to_json(summary(run(made)))["findings"][0]["ignored"] == shown


def test_the_live_progress_shows_a_cause_once() -> None:
    laws = [LawReport(name, judged=3, finding=finding(name)) for name in ("parity", "well_formed")]
    report = run(ImplementationReport("mine", "kernels:mine", "merge_state", laws=laws))
    stream = io.StringIO()
    watch = Watch(console(stream), SimpleNamespace(report=report), NoCases(), {})  # type: ignore[arg-type]
    for law in laws:
        assert law.finding
        watch.found(law.finding)
    first, second = stream.getvalue().splitlines()
    assert first.startswith("FAIL nan  mine  parity: out[0, 1]")
    assert second == "FAIL nan  mine  well_formed: the same cause as under parity"


class NoCases:
    def write_found(self, finding: Finding, report: RunReport) -> None:
        """Write nothing."""


def test_the_json_names_the_provider_and_its_version() -> None:
    told = replace(passing(), declared={"provider": "torch", "provider_version": "2.9.1"})
    refused = replace(passing(), error="cannot be imported")
    (one, other) = json.loads(dumps(to_json(summary(run(told, refused)))))["implementations"]
    assert (one["provider"], one["provider_version"]) == ("torch", "2.9.1")
    assert (other["provider"], other["provider_version"]) == ("", None)


def test_json_has_no_infinities() -> None:
    assert json.loads(dumps({"a": [float("inf"), (1.0, float("nan"))]})) == {
        "a": ["inf", [1.0, "nan"]]
    }


def test_junit_parses_and_counts() -> None:
    root = ET.fromstring(to_junit(summary(run(failing(), UNSUPPORTED, NO_ANSWER))))  # noqa: S314
    broken, mine, other = root.findall("testsuite")  # what is wrong comes first
    cases = {case.get("name"): case for case in mine.findall("testcase")}
    failure = cases["parity"].find("failure")
    assert failure is not None
    assert failure.get("type") == "FAIL nan"
    assert "\\x1b[31mNaN\\x00 <b>&amp; ]]> \\xd800" in str(failure.text)
    assert "empty='all'" in str(failure.text)
    known = cases["merge_identity"].find("skipped")
    assert known is not None
    assert known.get("message", "").startswith("KNOWN merge-empty: 4 problems: merging nothing")
    assert cases["merge_union"].find("skipped") is not None
    told = {each.get("name"): each.get("value") for each in cases["parity"].iter("property")}
    assert told["judged"] == "3"
    assert (mine.get("tests"), mine.get("failures"), mine.get("skipped")) == ("3", "1", "2")
    skipped = [case.find("skipped") for case in other.findall("testcase")]
    assert len(skipped) > 3
    assert all(each is not None and each.get("message") == "needs a GPU" for each in skipped)
    assert broken.get("errors") == "1"
    assert root.get("tests") == str(3 + len(skipped) + 1)


def test_junit_of_a_run_that_did_not_start() -> None:
    root = ET.fromstring(to_junit(summary(run(), failure="no CUDA device")))  # noqa: S314
    assert root.get("errors") == "1"


class Tags(HTMLParser):
    """Collects the tags of a page and checks that they nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: Counter[str] = Counter()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self.seen[tag] += 1
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_escaped_and_needs_nothing_else() -> None:
    page = to_html(summary(run(failing(), UNSUPPORTED)))
    tags = Tags()
    tags.feed(page)
    assert not tags.open
    assert tags.seen["table"] == 5
    assert not tags.seen.keys() & {"b", "script", "link", "img"}
    assert "<b>&amp;" in tags.text
    assert "needs a GPU" in tags.text
    assert not re.search(r"https?://(?!example)", page)
    page.encode()


def printed(
    made: Summary,
    monkeypatch: pytest.MonkeyPatch,
    columns: str | None = None,
    *,
    verbose: bool = False,
) -> str:
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", columns)
    stream = io.StringIO()
    print_summary(console(stream), made, verbose=verbose)
    return stream.getvalue()


def test_what_was_left_behind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [Left("process", "sleep 600\x1b[31m", 3), *(Left("process", f"p{n}") for n in range(6))]
    made = summary(run(replace(passing(), left=left), left=[Left("shared memory", "segment 7")]))
    text = printed(made, monkeypatch)
    assert "note: mine: it left a process, which was ended: sleep 600\\x1b[31m (3 times)\n" in text
    assert "note: mine: it left 2 more; the JSON report names them\n" in text
    assert "by which implementation is not known: shared memory: segment 7\n" in text
    data = to_json(made)
    assert data["left"] == [{"kind": "shared memory", "name": "segment 7", "count": 1}]
    assert [each["count"] for each in data["implementations"][0]["left"]] == [3, *[1] * 6]
    assert "left a process, which was ended: p5" in to_html(made)


def test_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    report = failing()
    command = replay_command(Path("a folder") / ("x" * 2 * PLAIN_WIDTH + ".json"))
    assert report.laws[0].finding is not None
    report.laws[0].finding.replay = command
    text = printed(summary(run(report, UNSUPPORTED)), monkeypatch)
    assert f"replay:  {command}\n" in text
    assert "[red]" in text  # no markup of ours
    assert "\x1b" not in text
    assert "problem: MergeProblem(num_tokens=3, empty='all')" in text
    issue = "(https://example.org/1)"
    assert f"KNOWN merge-empty: 4 problems: merging nothing <gives> nothing {issue}\n" in text
    assert "UNSUPPORTED  other\n  needs a GPU" in text
    assert text.startswith("NOT CONFORMING: 1 new finding, 1 known; 7 problems")
    order = ["NOT CONFORMING", "FAIL nan", "KNOWN merge-empty: ", "passed: ", "UNSUPPORTED  other"]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)
    known = finding("merge_identity", entry="merge-empty", replay="kernelproof replay known.json")
    report.laws[1].finding = known
    more = printed(summary(run(report, UNSUPPORTED)), monkeypatch, verbose=True)
    assert f"KNOWN merge-empty  mine: 4 problems: merging nothing <gives> nothing {issue}\n" in more
    assert "replay:  kernelproof replay known.json\n" in more
    assert "not run: mine  merge_union: (5 unsupported, 2 with nothing to judge)" in more


def test_too_little_makes_a_run_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = (Gap("law", "soak", judged=1, floor=3, seconds=4.0), Gap("edge", "several_tiles"))
    short = replace(passing(), coverage=Coverage(1, {"parity": 7}, gaps=gaps))
    said = summary(run(short, passing("other")))
    assert (said.verdict, said.code) == ("incomplete", 4)
    missing = "1 of 3 problems under soak, 0 of 1 problem with several tiles of keys"
    assert said.sentence.startswith(
        f"INCOMPLETE: mine: {missing}; the rest would take a worker more than 4 s; no new"
    )
    assert f"INCOMPLETE: mine: {missing}" in printed(said, monkeypatch).splitlines()[1]
    assert to_json(said)["implementations"][0]["coverage"]["gaps"][0]["name"] == "soak"
    assert 'class="INCOMPLETE"' in to_html(said)
    several = summary(run(short, *(replace(short, name=f"mine{n}") for n in range(3))))
    assert several.sentence.startswith(
        "INCOMPLETE: too little was judged of 4 implementations: mine, mine0, mine1, ...; no new"
    )
    stopped = printed(
        replace(several, report=replace(several.report, ended="interrupted")), monkeypatch
    )
    assert "INCOMPLETE: 4 implementations (-v says what is missing of each)\n" in stopped
    assert missing not in stopped
    allowed = summarise(run(short), LEDGER, gate=False, command="", allow_incomplete=True)
    assert (allowed.verdict, allowed.code) == ("incomplete", 0)
    found = replace(failing(), coverage=short.coverage)
    assert summary(run(found)).verdict == "nonconforming"  # a finding beats it


def test_a_law_that_needs_what_is_not_declared_is_why_nothing_was_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    idle = ImplementationReport("mine", "kernels:mine", "merge_state", laws=[LawReport("soak")])
    assert "needs what is not declared" in printed(summary(run(idle)), monkeypatch)
    laws = [LawReport("far_pages"), LawReport("far_tokens")]
    far = replace(idle, operation="paged_attention", laws=laws, declared={"declares": ["fp8_kv"]})
    assert (
        "it does not declare what the laws need: large_tensors or large_caches (far_pages); "
        "large_tensors or large_rows (far_tokens)"
    ) in " ".join(printed(summary(run(far)), monkeypatch).split())
    touched = replace(far, laws=[LawReport("touched_memory")])
    said = "Triton's interpreter runs no kernel of it (touched_memory)"
    assert said in " ".join(printed(summary(run(touched)), monkeypatch).split())
    claims = replace(far, declared={"declares": ["large_caches"]})
    assert "does not declare" not in printed(summary(run(claims)), monkeypatch)


def test_what_weakens_a_result_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    report = passing()
    report.laws[0].ended, report.laws[0].flaky = "time", 1
    report.coverage = Coverage(asked=1, judged={"parity": 7}, early={"parity": "time"})
    text = printed(summary(run(report)), monkeypatch)
    # The run itself had minutes left.
    assert (
        "fewer problems than planned, as the laws' share of the time was over: mine: parity" in text
    )
    report.coverage = replace(report.coverage, early={"parity": "time", "soak": "stopped"})
    ended = printed(summary(replace(run(report), ended="time")), monkeypatch)
    assert (
        "fewer problems than planned, as the laws' share of the time was over: mine: parity\n"
        in ended
    )
    assert "out of the run's time before all problems were judged: mine: soak\n" in ended
    report.coverage = replace(report.coverage, early={"far_pages": "room"})
    full = printed(summary(run(report)), monkeypatch)
    assert "without room in memory at any time of the run: mine: far_pages" in full
    assert "note: mine: 1 failure not confirmed" in text


def test_problems_that_memory_had_no_room_for_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    report = passing()
    assert "no room in memory" not in printed(summary(run(report)), monkeypatch)
    problem = AttentionProblem()
    report.laws[0].without_room = {problem.id: problem}
    told = "note: mine: 1 problem not judged, for there was no room in memory"
    assert f"{told}\n" in printed(summary(run(report)), monkeypatch)
    report.laws[0].too_large = {problem.id}
    limited = f"{told}; KERNELPROOF_WORKER_GIB raises a worker's limit\n"
    assert limited in printed(summary(run(report)), monkeypatch)


def test_a_narrow_terminal_folds_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    report = failing()
    assert report.laws[0].finding is not None
    report.laws[0].finding.replay = "kernelproof replay " + "y" * 90
    text = printed(summary(run(report)), monkeypatch, columns="40", verbose=True)
    assert "y" * 90 in text
    shown = text.splitlines()
    start = shown.index("mine")
    assert all(len(line) <= 40 for line in shown[start : start + 3])
    assert "7 judged, 5 unsupported, 0 rejected, 1\n" in text


def test_a_problem_is_told_by_what_is_not_simplest() -> None:
    assert compact(AttentionProblem()) == "AttentionProblem()"
    told = compact(AttentionProblem(seq_lens=(3,), causal=True))
    assert told == "AttentionProblem(seq_lens=(3,), causal=True)"


def writer(folder: Path) -> CaseWriter:
    return CaseWriter(folder, None, LEDGER)


def test_case_files_are_read_back(tmp_path: Path) -> None:
    report = run(failing())
    writer(tmp_path / "new").write_all(report)
    new, known = report.findings
    (path,) = (tmp_path / "new").iterdir()
    assert path.name == f"mine-parity-{new.problem.id}.json"
    assert new.replay == f"kernelproof replay {path}"
    law, problem, data = read_case(path)
    assert (law, problem) == ("parity", new.problem)
    assert (data["implementation"], data["seed"], data["device"]) == ("kernels:mine", 3, "cpu")
    assert data["versions"]["torch"] == "2.13.0"
    assert known.replay == f"kernelproof replay {ENTRY.case}"


def test_names_that_are_no_file_names(tmp_path: Path) -> None:
    first, second = failing(), replace(failing(), reference="kernels:other")
    for report in (first, second):
        report.name = "../my kernel/é"
        del report.laws[1:]
        report.laws[0].finding = finding(implementation=report.name)
    both = run(first, second)
    writer(tmp_path).write_all(both)
    names = sorted(path.name for path in tmp_path.iterdir())
    identity = both.findings[0].problem.id
    assert names == [f"my-kernel-parity-{identity}{more}.json" for more in ("-2", "")]
    assert [read_case(tmp_path / name)[2]["implementation"] for name in names] == [
        "kernels:other",
        "kernels:mine",
    ]
    assert loading_name("kernelproof.impl.torch.sdpa:paged") == "torch-sdpa-paged"


def test_a_case_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = writer(tmp_path / "file")
    made.write_all(run(failing()))
    assert "--cases" in made.failed


def test_files_are_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.txt"
    write_text(path, "half \ud800 of it")
    assert path.read_text() == "half \\ud800 of it"
    assert [each.name for each in path.parent.iterdir()] == ["a.txt"]


@pytest.fixture
def in_colour(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], str]:
    def show(no_color: bool) -> str:
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.delenv("NO_COLOR", raising=False)
        if no_color:
            monkeypatch.setenv("NO_COLOR", "1")
        return printed(summary(run(failing())), monkeypatch)

    return show


def test_no_color_is_respected(in_colour: Callable[[bool], str]) -> None:
    red = re.compile(r"\x1b\[[0-9;]*3[0-7]m")
    assert red.search(in_colour(False))  # noqa: FBT003
    assert not red.search(in_colour(True))  # noqa: FBT003
    assert sys.stdout is not None


def test_the_first_line_of_a_conforming_run_counts_the_laws_that_were_left_out() -> None:
    laws = [
        LawReport("parity", judged=9, floor=3),
        LawReport("merge_union", judged=3, floor=3, ended="time"),
        LawReport("merge_chunks", judged=4, floor=3, ended="stopped"),
        LawReport("merge_identity", ended="idle", floor=3, vacuous=70),
        LawReport("well_formed", ended="rare", floor=3, judged=1, vacuous=70),
    ]
    made = ImplementationReport("mine", "kernels:mine", "merge_state", laws=laws)
    second = replace(made, name="second")
    ended = summary(run(made, second, UNSUPPORTED), gate=True)
    assert ended.code == 0
    counted = "laws cut short by time: 4, with nothing to judge: 2"
    assert ended.sentence == (
        f"CONFORMING: no new finding, 0 known; {counted}; 34 problems judged in 1.2 s"
    )
    assert counted in to_html(ended)
    whole = summary(run(passing()))
    assert "laws cut short by time: 0, with nothing to judge: 0; " in whole.sentence


@pytest.mark.parametrize("ended", ["time", "stopped"])
@pytest.mark.parametrize(("judged", "code"), [(0, 4), (2, 4), (3, 0)])
def test_a_law_below_its_floor_makes_a_run_incomplete(
    ended: Any,  # noqa: ANN401  a word
    judged: int,
    code: int,
) -> None:
    short = LawReport("merge_union", judged=judged, floor=3, ended=ended)
    laws = [LawReport("parity", judged=9, floor=3), short]
    made = ImplementationReport("mine", "kernels:mine", "merge_state", laws=laws)
    result = summary(run(made))
    assert result.code == code
    if code:
        expected = f"INCOMPLETE: mine: {judged} of 3 problems under merge_union; "
        assert result.sentence.startswith(expected)


def test_lines_of_a_gate_need_no_glossary() -> None:
    told = claims_count([passing(), passing("other")])
    assert told.startswith("0 of 2 implementations support only a part of what a call may ask for")
    report = passing()
    report.corpus = CorpusReport(replayed=2, of_ledger=1)
    assert replayed(run(report)).endswith("(1 of known findings)")


@pytest.mark.parametrize("label", ["rule", "replay", "problem", "accepted"])
def test_a_label_of_any_length_has_a_space_behind_it(label: str) -> None:
    out = io.StringIO()
    command(console(out), label, "called by nobody")
    assert re.fullmatch(rf"  {label}: +called by nobody\n", out.getvalue())
