"""The ledger and the corpus are edited, comments stay, and what is written reads back."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from kernelproof.ci.cli import main
from kernelproof.ci.ledger import editing
from kernelproof.fixtures import LEDGER
from kernelproof.impl.targets.optional import missing
from kernelproof.properties.findings.files import OutputError
from kernelproof.properties.findings.ledger import Entry, load_ledger, read_case
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.reference import AttentionProblem, MergeProblem, problem_from_json

EMPTY = MergeProblem(empty="all")
HEAD = "# The head of the file.\n\n"
ENTRY = """[[finding]]
id = "flashinfer-cascade-empty"
implementation = "flashinfer-cascade"
laws = ["parity"]
status = "FAIL"
where = { empty = "all" }
versions = { flashinfer = ">=0.6" }
case = "corpus/flashinfer-cascade-empty.json"
reason = \"\"\"
It divides by zero.
\"\"\"
"""
OTHER = ENTRY.replace("flashinfer-cascade", "other").replace(
    'versions = { flashinfer = ">=0.6" }\n', ""
)


TWO_FAULTS = """
from dataclasses import replace
from pathlib import Path

from kernelproof.impl import find_implementation, implementation

sdpa = find_implementation("torch-sdpa-paged")


@implementation("paged_attention", name="mine", supports=sdpa.supports, arithmetic=sdpa.arithmetic)
def attend(inputs):
    out, _ = sdpa.function(replace(inputs, window_left=-1))
    if inputs.kv_layout == "HND":
        out = -out
    if Path("one-more").exists() and inputs.causal:
        out = out + 1
    return out, None
"""


def case(implementation: str, **more: object) -> dict[str, Any]:
    return {
        "schema": "kernelproof/case/1",
        "law": "parity",
        "implementation": implementation,
        "problem": EMPTY.to_json(),
        **more,
    }


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.toml"
    path.write_text(f"{HEAD}{ENTRY}\n{OTHER}")
    (tmp_path / "corpus").mkdir()
    for name in ("flashinfer-cascade", "other"):
        (tmp_path / "corpus" / f"{name}-empty.json").write_text(json.dumps(case(name)))
    return path


def report(folder: Path, *findings: dict[str, Any]) -> Path:
    path = folder / "report.json"
    target = {"device": "cuda", "sm": 90, "flashinfer": "0.7.2"}
    mine = {"name": "flashinfer-mine", "provider": "flashinfer-python"}
    told = {"target": target, "findings": findings, "implementations": [mine]}
    path.write_text(json.dumps({"schema": "kernelproof/report/1", **told}))
    return path


def finding(problem: Any, **more: Any) -> dict[str, Any]:  # noqa: ANN401  any problem
    return {
        "implementation": "flashinfer-cascade",
        "law": "parity",
        "status": "FAIL",
        "kind": "nan",
        "message": "out is NaN",
        "entry": None,
        "problem": problem.to_json(),
        **more,
    }


def update(ledger: Path, *more: str) -> int:
    folder = ledger.parent
    return main(
        ["expectations", "update", str(folder / "report.json"), "--ledger", str(ledger), *more]
    )


def test_a_failure_becomes_known(ledger: Path) -> None:
    small = MergeProblem(regime="shifted")
    report(
        ledger.parent,
        finding(MergeProblem(regime="shifted", num_tokens=9)),
        finding(small, law="well_formed"),
        finding(EMPTY, status="KNOWN", entry="flashinfer-cascade-empty"),
    )
    issue = "https://github.com/flashinfer-ai/flashinfer/issues/1"
    assert update(ledger, "--reason", 'It says "no".', "--issue", issue) == 0
    text = ledger.read_text()
    assert text.startswith(HEAD + ENTRY)
    assert text.endswith(OTHER)
    mine, new, _ = load_ledger(str(ledger)).entries
    assert mine.id == "flashinfer-cascade-empty"
    assert (new.id, new.implementation) == (
        "flashinfer-cascade-parity-nan",
        "flashinfer-cascade",
    )
    assert new.laws == ("parity", "well_formed")
    assert new.where == {"regime": "shifted"}
    assert (new.versions, new.device, new.sm) == ({"flashinfer": "==0.7.2"}, "cuda", (90,))
    assert (new.reason, new.issue) == ('It says "no".', issue)
    assert new.load_case() == ("parity", small)
    assert update(ledger, "--reason", "again") == 0  # it says so already
    assert [each.id for each in load_ledger(str(ledger)).entries] == [
        mine.id,
        new.id,
        "other-empty",
    ]


def test_an_entry_that_passes_is_narrowed_or_retired(
    ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(
        ledger.parent,
        *(
            finding(EMPTY, kind="unexpected_pass", message="in any words", contradicts=name)
            for name in ("flashinfer-cascade-empty", "other-empty")
        ),
    )
    assert update(ledger, "--dry-run") == 0
    assert ledger.read_text() == f"{HEAD}{ENTRY}\n{OTHER}"
    assert update(ledger) == 0
    assert ledger.read_text() == HEAD + ENTRY.replace('">=0.6"', '">=0.6,!=0.7.2"')
    assert (
        "PASSES other-empty: its case is right; it is retired by 0.7.2" in capsys.readouterr().out
    )


def test_a_report_that_names_no_entries_is_refused(
    ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(ledger.parent, finding(EMPTY, kind="unexpected_pass"))
    assert update(ledger) == 2
    assert "findings[0] names no entry of the ledger" in capsys.readouterr().err
    assert ledger.read_text() == f"{HEAD}{ENTRY}\n{OTHER}"


def test_a_failure_of_any_distribution_is_bound_to_its_version(ledger: Path) -> None:
    theirs = finding(MergeProblem(num_tokens=7), implementation="theirs")
    path = report(ledger.parent, theirs, finding(EMPTY, implementation="torch-moe"))
    data = json.loads(path.read_text())
    data["implementations"] = [
        {"name": "theirs", "provider": "Their.Kernels", "provider_version": "1.4"},
        {"name": "torch-moe", "provider": "torch", "provider_version": "2.13.0"},
    ]
    path.write_text(json.dumps(data))
    assert update(ledger, "--reason", "They know.") == 0
    entries = {entry.implementation: entry for entry in load_ledger(str(ledger)).entries}
    assert entries["theirs"].versions == {"their-kernels": "==1.4"}
    assert not entries["torch-moe"].versions
    wide = ledger.read_text().replace('"==1.4"', '">=1.4"')
    ledger.write_text(wide)
    data["implementations"][0]["provider_version"] = "1.5"
    data["findings"] = [{**theirs, "kind": "unexpected_pass", "contradicts": "theirs-parity-nan"}]
    path.write_text(json.dumps(data))
    assert update(ledger) == 0
    assert ledger.read_text() == wide.replace('">=1.4"', '">=1.4,!=1.5"')


def test_what_a_comparison_says_is_taken_too(ledger: Path) -> None:
    problem = AttentionProblem(causal=True)
    findings = [
        {
            "change": "fixed",
            "entry": "flashinfer-cascade-empty",
            "problem": None,
            "subject": "x",
        },
        {
            "change": "new-failure",
            "entry": "",
            "subject": "mine",
            "laws": ["parity", "soak"],
            "candidate": {"status": "HANG", "kind": "run"},
            "problem": {**problem.to_json(), "id": problem.id, "told": "..."},
        },
    ]
    content = {
        "schema": "kernelproof/bump/1",
        "findings": findings,
        "candidate": {"flashinfer": "0.8"},
        "machines": [{"device": "cpu", "chip": "cpu"}],
    }
    (ledger.parent / "report.json").write_text(json.dumps(content))
    assert update(ledger, "--reason", "It waits for ever.") == 0
    entries = {entry.id: entry for entry in load_ledger(str(ledger)).entries}
    assert entries["flashinfer-cascade-empty"].versions == {"flashinfer": ">=0.6,!=0.8"}
    assert entries["mine-parity-run"].quarantine
    assert entries["mine-parity-run"].where == {"causal": True}
    assert not entries["mine-parity-run"].versions


def test_a_comparison_of_another_package_binds_entries_to_its_version(ledger: Path) -> None:
    problem = MergeProblem(regime="shifted")
    entry = "flashinfer-cascade-empty"
    fixed = {"change": "fixed", "entry": entry, "problem": None, "subject": "x"}
    failure = {
        "change": "new-failure",
        "entry": "",
        "subject": "triton-merge-state",
        "laws": ["parity"],
        "candidate": {"status": "FAIL", "kind": "numeric"},
        "problem": {**problem.to_json(), "id": problem.id, "told": "..."},
    }
    content = {
        "schema": "kernelproof/bump/1",
        "package": "triton",
        "findings": [fixed, failure],
        "candidate": {"flashinfer": "0.8", "version": "3.9.0"},
        "machines": [{"device": "cpu", "chip": "cpu"}],
    }
    (ledger.parent / "report.json").write_text(json.dumps(content))
    assert update(ledger, "--reason", "It rounds.") == 0
    entries = {entry.id: entry for entry in load_ledger(str(ledger)).entries}
    assert entries["flashinfer-cascade-empty"].versions == {"flashinfer": ">=0.6"}
    assert entries["triton-merge-state-parity-numeric"].versions == {"triton": "==3.9.0"}


@pytest.mark.parametrize(
    ("content", "more", "said"),
    [
        ("{}", (), "its schema is None"),
        ("nonsense", (), "not JSON"),
        ('{"schema": "kernelproof/report/1"}', (), "missing required field `findings`"),
        (None, (), "--reason is missing: 1 failures"),
        (None, ("--reason", " "), "--reason is missing"),
    ],
)
def test_a_wrong_report_changes_nothing(
    ledger: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    more: tuple[str, ...],
    said: str,
) -> None:
    path = report(ledger.parent, finding(MergeProblem(regime="shifted")))
    if content is not None:
        path.write_text(content)
    assert update(ledger, *more) == 2
    assert said in capsys.readouterr().err
    assert ledger.read_text() == f"{HEAD}{ENTRY}\n{OTHER}"


def test_an_update_that_cannot_be_written_takes_back_its_own_cases_only(
    ledger: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others = ledger.parent / "corpus" / "others.json"

    def full(*_: object) -> None:
        assert (others.parent / "flashinfer-cascade-parity-nan.json").exists()
        others.write_text("{}")  # another process keeps a case meanwhile
        raise OutputError("ledger.toml: cannot be written (No space left on device)")  # noqa: TRY003, EM101

    before = set(others.parent.iterdir())
    report(ledger.parent, finding(MergeProblem(regime="shifted")))
    monkeypatch.setattr(editing, "replace_ledger", full)
    assert update(ledger, "--reason", "It is broken.") == 2
    assert "No space left" in capsys.readouterr().err
    assert set(others.parent.iterdir()) == {*before, others}


def test_a_problem_with_nothing_special_explains_every_problem(
    ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(ledger.parent, finding(MergeProblem(head_dim=4)))
    assert update(ledger, "--reason", "It is broken.") == 0
    assert "it explains every problem" in capsys.readouterr().out
    assert load_ledger(str(ledger)).entries[1].where == {}


def test_an_entry_of_the_name_is_widened_or_has_company(ledger: Path) -> None:
    def learn(values: dict[str, Any], problem: MergeProblem, law: str = "parity") -> list[Entry]:
        cause = {"values": values, "failing": 5, "passing": 0, "others": 9}
        more = {"laws": ["parity", law], "kinds": ["nan"], "cause": cause}
        report(ledger.parent, finding(problem, **more))
        assert update(ledger, "--reason", "It divides by zero.") == 0
        entries = load_ledger(str(ledger)).entries
        return [each for each in entries if each.id.startswith("flashinfer-cascade-parity")]

    (entry,) = learn({"num_tokens": {"min": 9}}, MergeProblem(num_tokens=9))
    assert entry.where == {"num_tokens": {"min": 9}}
    (entry,) = learn({"num_tokens": {"min": 5}}, MergeProblem(num_tokens=5), "soak")
    assert (entry.where, entry.laws) == ({"num_tokens": {"min": 5}}, ("parity", "soak"))
    entry, other = learn({"empty": "all"}, EMPTY)
    assert (entry.where, other.where) == ({"num_tokens": {"min": 5}}, {"empty": "all"})
    assert other.id == f"{entry.id}-2"
    *_, other = learn({"empty": "some"}, MergeProblem(empty="some"))
    assert other.where == {"empty": ["all", "some"]}


def test_what_is_accepted_makes_the_next_run_conforming(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wrong_merge: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(wrong_merge)
    laws = ["--law", "parity", "--law", "well_formed", "--law", "merge_commutativity"]
    check = ["check", "mine.py:merge", "--profile", "quick", *laws, "--json", "r.json"]
    assert main(check) == 1
    (found,) = json.loads(Path("r.json").read_text())["findings"]
    assert "empty" in found["cause"]["values"]
    assert "head_dim" not in found["cause"]["values"]
    words = ["expectations", "update", "r.json", "--ledger", "known.toml", "--reason", "Empty."]
    assert main(words) == 0
    capsys.readouterr()
    assert main([*check, "--expectations", "known.toml", "--allow-incomplete"]) == 0
    out = capsys.readouterr().out
    assert "KNOWN mine-" in out
    told = json.loads(Path("r.json").read_text())
    assert [each["status"] for each in told["findings"]] == ["KNOWN"]
    assert len(told["known"]) == 1


def test_two_faults_of_a_kernel_become_two_entries_and_a_third_is_still_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # No clock decides what is drawn, and how far it shrinks: a busy machine finds the same entries.
    patient = replace(PROFILES["quick"], shrink_seconds=120.0, seconds=600.0)
    monkeypatch.setitem(PROFILES, "quick", patient)
    monkeypatch.setattr("kernelproof.properties.search.deadlines.DEADLINE_FLOOR", 60.0)
    cost = {"name": "fast", "problems": 1.0, "max_work": 20_000}
    known = {"schema": "kernelproof-costs-1", "profile": "quick", "device": "cpu"}
    Path("costs.json").write_text(json.dumps({**known, "costs": {"mine": cost}}))
    Path("mine.py").write_text(TWO_FAULTS)
    Path("known.toml").write_text("")
    outputs = ["--json", "r.json", "--html", "r.html", "--junit", "r.xml", "--allow-incomplete"]
    words = [
        "check",
        "mine.py:attend",
        "--profile",
        "quick",
        "--law",
        "parity",
        "--seed",
        "2",
        "--costs",
        "costs.json",
        *outputs,
    ]
    check = [*words, "--expectations", "known.toml"]
    updates = 0
    while (code := main(check)) == 1 and updates < 6:
        updates += 1
        report = ["r.json", "--ledger", "known.toml", "--reason", f"Fault {updates}."]
        assert main(["expectations", "update", *report]) == 0
        capsys.readouterr()
    assert code == 0
    entries = load_ledger("known.toml").entries
    assert {"window_left", "kv_layout"} <= {name for entry in entries for name in entry.where}
    assert all(entry.where for entry in entries)
    out, told = capsys.readouterr().out, json.loads(Path("r.json").read_text())
    count = len(told["known"])
    assert count >= 2
    assert f"no new finding, {count} known" in out
    assert f"no new finding, {count} known" in Path("r.html").read_text()
    assert {each["entry"] for each in told["findings"]} <= {each["entry"] for each in told["known"]}
    assert all(each["entry"] in Path("r.xml").read_text() for each in told["findings"])
    Path("one-more").touch()
    assert main(check) == 1
    (new,) = (
        each
        for each in json.loads(Path("r.json").read_text())["findings"]
        if each["status"] != "KNOWN"
    )
    assert new["problem"]["causal"]


def test_a_case_is_added_once_and_without_what_a_run_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "case.json"
    path.write_text(json.dumps(case("my.module:merge", verdict={"status": "FAIL"}, seed=3)))
    folder = tmp_path / "corpus"
    assert main(["corpus", "add", str(path), "--folder", str(folder)]) == 0
    (added,) = folder.iterdir()
    assert capsys.readouterr().out.strip() == str(added)
    law, problem, data = read_case(added)
    assert (law, problem, data["implementation"]) == ("parity", EMPTY, "my.module:merge")
    assert set(data) == {"schema", "law", "implementation", "problem"}
    assert main(["corpus", "add", str(path), "--folder", str(folder)]) == 2
    assert "the corpus has it" in capsys.readouterr().err
    path.write_text(json.dumps(case("mine", law="append_parity")))
    assert main(["corpus", "add", str(path), "--folder", str(folder)]) == 2
    assert main(["corpus", "add", str(tmp_path / "no.json"), "--folder", str(folder)]) == 2


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("kernels/mine.py:merge", "kernels/mine.py:merge"),
        ("{here}/kernels/mine.py:merge", "kernels/mine.py:merge"),
        ("kernelproof.impl.flashinfer.triton:merge_state", "flashinfer-triton-merge-state"),
        ("my.module:merge", "my.module:merge"),
    ],
)
def test_a_case_is_added_without_paths_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, kept: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("case.json").write_text(json.dumps(case(given.format(here=tmp_path))))
    assert main(["corpus", "add", "case.json", "--folder", "corpus"]) == 0
    (added,) = Path("corpus").iterdir()
    assert str(tmp_path) not in added.read_text()
    assert read_case(added)[2]["implementation"] == kept
    assert main(["corpus", "add", "case.json", "--folder", "corpus"]) == 2  # it has it


@pytest.mark.parametrize("given", ["/opt/kernels/mine.py:merge", "../mine.py:merge"])
def test_a_case_that_no_other_machine_can_replay_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("case.json").write_text(json.dumps(case(given)))
    assert main(["corpus", "add", "case.json", "--folder", "corpus"]) == 2
    said = capsys.readouterr().err
    assert f"case.json: its implementation {given} is a file of this machine" in said
    assert not Path("corpus").exists()


def test_an_added_case_is_replayed_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wrong_merge: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(wrong_merge)
    Path("case.json").write_text(json.dumps(case(f"{tmp_path}/mine.py:merge", seed=3)))
    assert main(["corpus", "add", "case.json", "--folder", "corpus"]) == 0
    words = ["--profile", "quick", "--law", "parity", "--corpus", "corpus"]
    assert main(["check", "mine.py:merge", *words, "--json", "r.json", "--html", "r.html"]) == 1
    found = json.loads(Path("r.json").read_text())
    counts = {"replayed": 1, "of_ledger": 0, "known": 0, "unjudged": 0, "left_out": 0}
    assert {**found["corpus"], "seconds": 0} == {**counts, "seconds": 0}
    (first, *_) = found["findings"]
    (added,) = Path("corpus").iterdir()
    assert (first["law"], first["kind"]) == ("parity", "nan")
    assert problem_from_json(first["problem"]).work <= EMPTY.work, "the law may find a smaller one"
    ended = capsys.readouterr()
    replay = next(line for line in ended.err.splitlines() if "kernelproof replay" in line)
    assert replay.strip() == f"kernelproof replay {added}"
    assert "corpus: 1 stored case replayed first in " in ended.out
    assert "1 stored case replayed first in " in Path("r.html").read_text()
    assert main(["check", "mine.py:merge", *words[:-1], "no"]) == 2
    assert "--corpus: no: there is no such folder" in capsys.readouterr().err


def test_a_case_of_the_shipped_corpus_goes_by_its_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wrong_merge: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "flashinfer-triton-merge-state-empty.json"
    Path("mine.py").write_text(wrong_merge)
    assert main(["replay", name, "--implementation", "mine.py:merge"]) == 1
    Path(name).write_text("{}")  # a file that is here comes first
    assert main(["replay", name]) == 2
    assert "Object missing required field `law`" in capsys.readouterr().err


ODD = """# head
  [[finding]] # an odd one
id='flashinfer-cascade-parity-nan'
implementation   =   "flashinfer-cascade" # whose
laws = [ # under these
  "parity", # at first
]
status = "FAIL"
kinds = ["nan"]
device = "cuda"
case = "corpus/flashinfer-cascade-empty.json"
reason = \"\"\"
It divides.
# This is no comment.
\"\"\"
versions.flashinfer = "==0.7.2"
[finding.where] # this one
# The least is not known.
num_tokens = { min = 9 }


# What follows is another's.
"""


def test_comments_and_spacing_of_a_ledger_stay(ledger: Path) -> None:
    other = OTHER.rstrip("\n")  # no newline at its end
    ledger.write_text(ODD + other)
    content = {**case("flashinfer-cascade"), "problem": MergeProblem(num_tokens=9).to_json()}
    (ledger.parent / "corpus" / "flashinfer-cascade-empty.json").write_text(json.dumps(content))
    cause = {"values": {"num_tokens": {"min": 5}}, "failing": 5, "passing": 0, "others": 9}
    more = {"laws": ["parity", "soak"], "kinds": ["nan"], "cause": cause}
    new = finding(MergeProblem(regime="shifted"), kind="numeric")
    report(ledger.parent, finding(MergeProblem(num_tokens=5), **more), new)
    assert update(ledger, "--reason", "It rounds.") == 0
    before, comment, after = ODD.partition("\n\n# What follows is another's.\n")
    wide = before.replace("min = 9", "min = 5").replace(
        '"parity", # at first\n', '"parity", # at first\n  "soak",\n'
    )
    text = ledger.read_text()
    assert text.startswith(wide)
    assert text.endswith(comment + after + OTHER)
    first, added, _ = load_ledger(str(ledger)).entries
    assert (first.laws, first.where) == (("parity", "soak"), {"num_tokens": {"min": 5}})
    assert added.where == {"regime": "shifted"}


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_retired_entry_leaves_the_comments_around_it(ledger: Path, number: int) -> None:
    names = ("flashinfer-cascade-empty", "other-empty", "third-empty")
    third = OTHER.replace("other", "third")
    blocks = [ENTRY.replace('versions = { flashinfer = ">=0.6" }\n', ""), OTHER, third]
    comments = [f"# Above {name}.\n" for name in names]
    (ledger.parent / "corpus" / "third-empty.json").write_text(json.dumps(case("third")))
    ledger.write_text("\n".join(map("".join, zip(comments, blocks, strict=True))) + "# The end.\n")
    passing = finding(EMPTY, kind="unexpected_pass", contradicts=names[number])
    report(ledger.parent, passing)
    assert update(ledger) == 0
    text = ledger.read_text()
    places = [text.index(comment) for comment in [*comments, "# The end.\n"]]
    assert places == sorted(places)
    assert all((block in text) == (n != number) for n, block in enumerate(blocks))
    assert [each.id for each in load_ledger(str(ledger)).entries] == [
        name for n, name in enumerate(names) if n != number
    ]


def test_the_last_entry_is_retired_and_another_one_comes(ledger: Path) -> None:
    ledger.write_text(HEAD + OTHER)
    report(ledger.parent, finding(EMPTY, kind="unexpected_pass", contradicts="other-empty"))
    assert update(ledger) == 0
    assert ledger.read_text() == HEAD.rstrip("\n") + "\n"
    report(ledger.parent, finding(EMPTY))
    assert update(ledger, "--reason", "It divides by zero.") == 0
    assert ledger.read_text().startswith(f"{HEAD}[[finding]]\n")


def test_the_shipped_ledger_keeps_every_byte() -> None:
    document = editing.read_document(LEDGER)
    assert tomlkit.dumps(document) == LEDGER.read_text(encoding="utf-8")


def test_a_list_in_brackets_is_not_edited(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = (
        'finding = [{ id = "a", implementation = "b", reason = "c", status = "HANG", where = {} }]'
    )
    ledger.write_text(written)
    report(ledger.parent, finding(EMPTY))
    assert update(ledger, "--reason", "It divides by zero.") == 2
    assert "ledger.toml: finding is a list in brackets" in capsys.readouterr().err
    assert ledger.read_text() == written
    ledger.write_text("finding = []")
    assert update(ledger, "--reason", "It divides by zero.") == 0
    assert len(load_ledger(str(ledger)).entries) == 1


def test_without_tomlkit_nothing_is_edited(
    ledger: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report(ledger.parent, finding(EMPTY))
    missing.cache_clear()
    monkeypatch.setitem(sys.modules, "tomlkit", None)
    assert update(ledger, "--reason", "It divides by zero.") == 2
    said = "tomlkit cannot be imported (tomlkit is missing): python -m pip install"
    assert said in " ".join(capsys.readouterr().err.split())
    missing.cache_clear()
