"""Two made-up releases are compared: what changed is found, and what is broken is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from kernelproof.ci.bump import command
from kernelproof.ci.bump.behaviour.compiled import compile_findings, compiled_chips
from kernelproof.ci.bump.behaviour.records import Compared, Comparison
from kernelproof.ci.bump.behaviour.steps import unimported
from kernelproof.ci.bump.behaviour.watching import BumpProgress, progress
from kernelproof.ci.bump.command import _concerned
from kernelproof.ci.bump.sides import releases
from kernelproof.ci.bump.sides.plan import SOAK_ON_CPU, BumpPlan
from kernelproof.ci.bump.sides.releases import SIDES
from kernelproof.ci.cli import main
from kernelproof.impl.registry import BUILT_IN
from kernelproof.properties.findings.files import write_text
from kernelproof.properties.findings.ledger import Ledger
from kernelproof.properties.isolation.workers import Deadlines, WorkerPool
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.reference import MergeProblem

INIT = "__version__ = '{version}'\nfrom .cascade import BROKEN, SHIFT\n"
CASCADE = """
BROKEN, SHIFT = {broken}, {shift}


def merge_state(v_a, s_a, v_b, s_b{added}):
    return v_a
"""
ENUMS = """
import enum


class ActivationType(enum.IntEnum):
    {members}
"""
SUBJECT = """
import torch
import flashinfer
from kernelproof.impl import implementation


@implementation("merge_state", name="subject")
def merge(inputs):
    outs, lses = inputs.outs.double(), inputs.lses.double()
    lse = torch.logsumexp(lses, dim=0)
    empty = lse.isneginf() & (not flashinfer.BROKEN)
    weights = torch.exp(lses - torch.where(empty, 0.0, lse)).unsqueeze(-1)
    out = (weights * outs).sum(dim=0)
    scale = 1 + 2.0 ** -23 if flashinfer.SHIFT else 1.0
    return out.to(inputs.out_dtype), lse.float() * scale
"""
OLD, NEW = "9.9.1", "9.9.2"


def release(
    folder: Path,
    version: str,
    *,
    broken: bool = False,
    shift: bool = False,
    added: str = "",
    members: str = "Gelu = 0",
    init: str = "",
) -> Path:
    """Write a release: a package and its metadata."""
    package = folder / "flashinfer"
    package.mkdir(parents=True)
    files = {
        "__init__.py": init or INIT.format(version=version),
        "cascade.py": CASCADE.format(broken=broken, shift=shift, added=added),
        "tllm_enums.py": ENUMS.format(members=members),
        "utils.py": "",
    }
    for name, text in files.items():
        (package / name).write_text(text)
    metadata = folder / f"flashinfer_python-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: flashinfer-python\nVersion: {version}\n")
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of its own, with an implementation that both releases run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "subject.py").write_text(SUBJECT)
    return tmp_path


@pytest.fixture(scope="module")
def shared_workers() -> Iterator[Callable[..., Any]]:
    """Keep the workers of each release for the next comparison: starting them takes seconds."""
    pools: dict[tuple[str, ...], WorkerPool] = {}
    opened = releases.Release.workers
    with ExitStack() as stack:

        @contextmanager
        def workers(self: releases.Release, device: str, **options: Any) -> Iterator[WorkerPool]:  # noqa: ANN401
            if self.path not in pools:
                pools[self.path] = stack.enter_context(opened(self, device, **options))
            yield pools[self.path]

        yield workers


def gate(here: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Compare ``old`` and ``new`` by one law, and give the exit code and the report."""
    path = here / "report.json"
    code = main(
        ["gate", "--baseline", "old", "--candidate", "new", "--json", str(path),
         "--profile", "quick", "--law", "parity", "--implementation", "subject.py:merge",
         "--jobs", "1", *arguments]
    )  # fmt: skip
    return code, json.loads(path.read_text())


def test_another_release_concerns_what_comes_from_flashinfer() -> None:
    concerned = set(_concerned(all_of_them=False))
    assert {name for name in BUILT_IN if name in concerned} == {
        name for name, place in BUILT_IN.items() if ".flashinfer." in place
    }
    assert set(BUILT_IN) <= set(_concerned(all_of_them=True))


def by_change(report: dict[str, Any], change: str) -> list[dict[str, Any]]:
    return [each for each in report["findings"] if each["change"] == change]


REFUSING = """
from subject import merge as plain
from kernelproof.impl import implementation


@implementation("merge_state", name="subject", supports=lambda *_: "not today")
def merge(inputs):
    return plain(inputs)
"""


def test_a_bump_of_which_nothing_was_judged_is_undecided(here: Path) -> None:
    (here / "refusing.py").write_text(REFUSING)
    release(here / "old", OLD)
    release(here / "new", NEW)
    words = ["gate", "--baseline", "old", "--candidate", "new", "--part", "behaviour",
             "--sm", "cpu", "--jobs", "1", "--profile", "quick", "--json", "r.json"]  # fmt: skip
    assert main([*words, "--implementation", "refusing.py:merge"]) == 3
    report = json.loads((here / "r.json").read_text())
    assert (report["verdict"], report["chips"][0]["evidence"]) == ("undecided", "declared")
    assert "no problem was judged with the candidate: not today" in report["message"]
    assert report["not_tested"] == []  # the device is here


@pytest.mark.parametrize(("name", "code"), [("nothing", 2), ("other", 3)])
def test_what_no_release_imports_is_wrong_usage(here: Path, name: str, code: int) -> None:
    release(here / "old", OLD)
    release(here / "new", NEW)
    # One that needs the baseline is the candidate's failure.
    (here / "needing.py").write_text(
        f"import flashinfer\nassert flashinfer.__version__ == {OLD!r}\nfrom subject import merge\n"
    )
    (here / "hiding.py").write_text("def hide():\n    nothing = 1\n")
    subject = {"nothing": "hiding.py:nothing", "other": "needing.py:merge"}[name]
    words = ["gate", "--baseline", "old", "--candidate", "new", "--part", "behaviour",
             "--sm", "cpu", "--jobs", "1", "--profile", "quick", "--json", "r.json"]  # fmt: skip
    assert main([*words, "--implementation", subject]) == code
    report = json.loads((here / "r.json").read_text())
    assert (report["verdict"], report["exit_code"]) == ("undecided", code)
    assert f"{subject} with new: cannot be imported" in report["message"]


def test_a_law_of_other_operations_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release(here / "old", OLD)
    release(here / "new", NEW)
    words = ["gate", "--baseline", "old", "--candidate", "new", "--part", "behaviour",
             "--sm", "cpu", "--jobs", "1", "--implementation", "subject.py:merge"]  # fmt: skip
    assert main([*words, "--law", "parity", "--law", "routing_parity"]) == 2
    said = "--law routing_parity: speaks of route; what is compared is merge_state"
    assert said in " ".join(capsys.readouterr().err.split())
    assert [each.name for each in (here / ".kernelproof/gate").iterdir()] == ["old-new-cpu.jsonl"]


def test_two_releases_are_compared(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[BumpProgress] = []

    @contextmanager
    def watching(seconds: float) -> Iterator[BumpProgress]:
        with progress(seconds) as made:
            watched.append(made)
            yield made

    monkeypatch.setattr(command, "progress", watching)
    release(here / "old", OLD, members="Gelu = 0; Relu = 1")
    release(here / "new", NEW, broken=True, added=", alpha", members="Gelu = 0; Silu = 1; Relu = 2")
    code, report = gate(
        here, "--sm", "cpu,90", "--markdown", str(here / "c.md"), "--junit", str(here / "j.xml")
    )
    out, err = capsys.readouterr()
    assert code == report["exit_code"] == 1
    ran = report["machines"][0]["problems"]
    assert str(watched[0].judged) == f"ran {ran} of about {ran} problems with both releases"
    assert "] block  parameter-required  cascade.merge_state" in err
    assert "] new-failure  " in err
    assert report["schema"] == "kernelproof/bump/1"
    assert report["verdict"] == "do not bump"
    assert (report["baseline"]["flashinfer"], report["candidate"]["flashinfer"]) == (OLD, NEW)
    assert {each["chip"]: each["evidence"] for each in report["chips"]} == {
        "cpu": "run",
        90: "declared",
    }

    (required,) = by_change(report, "parameter-required")
    assert required["subject"] == "cascade.merge_state"
    (moved,) = by_change(report, "enum-number-moved")
    assert "Relu was 1, now 2" in moved["message"]

    (failure,) = by_change(report, "new-failure")
    assert failure["action"] == "block"
    assert failure["baseline"]["status"] == "PASS"
    assert (failure["candidate"]["status"], failure["candidate"]["kind"]) == ("FAIL", "nan")
    assert failure["problem"]["empty"] != "none"
    assert failure["problem"]["num_tokens"] == 1
    assert failure["id"] in report["chips"][0]["blocked_by"]
    assert "DO NOT BUMP" in out
    assert failure["replay"]["candidate"] in out

    words = failure["replay"]["candidate"].split()
    assert main(words[1:]) == 1
    assert main([*words[1:-1], "old"]) == 0
    markdown = (here / "c.md").read_text()
    assert "do not bump" in markdown
    assert "new\\-failure" in markdown or "new-failure" in markdown
    suites = ET.fromstring((here / "j.xml").read_text())  # noqa: S314  written above
    assert int(suites.get("failures", "0")) >= 3


def test_other_bits_inside_of_the_bound_are_told_and_do_not_block(here: Path) -> None:
    release(here / "old", OLD)
    release(here / "new", NEW, shift=True)
    code, report = gate(here, "--sm", "cpu", "--part", "behaviour")
    (bits,) = by_change(report, "bits-changed")
    assert bits["action"] == "report"
    assert bits["count"] > 0
    assert by_change(report, "new-failure") == []
    assert (code, report["verdict"]) == (0, "bump")
    (implementation,) = report["machines"][0]["implementations"]
    assert implementation["bits"]["other_inputs"] == 0
    assert implementation["runs"] == ["baseline", "candidate"]


BUILT_AHEAD = """
import time
from subject import merge as plain
from kernelproof.impl import implementation


@implementation("merge_state", name="subject", build_ahead=True,
                compile_key=lambda problem: (problem.dtype, problem.num_states))
def merge(inputs):
    return plain(inputs)
"""


def test_modules_are_chosen_once_and_built_for_both(here: Path) -> None:
    (here / "ahead.py").write_text(BUILT_AHEAD)
    release(here / "old", OLD)
    release(here / "new", NEW, broken=True)
    code, report = gate(
        here,
        "--sm",
        "cpu",
        "--part",
        "behaviour",
        "--implementation",
        "ahead.py:merge",
        "--modules",
        "2",
    )
    assert code == 1
    plain, ahead = report["machines"][0]["implementations"]
    assert (plain["modules"], ahead["modules"]) == (0, 2)
    (builds,) = report["machines"][0]["timings"]["builds"]
    assert {side: len(each) for side, each in builds["seconds"].items()} == {
        "baseline": 2,
        "candidate": 2,
    }
    assert {each["subject"] for each in by_change(report, "new-failure")} == {
        "subject.py:merge",
        "ahead.py:merge",
    }


def test_what_was_fixed_is_told(here: Path) -> None:
    release(here / "old", OLD, broken=True)
    release(here / "new", NEW)
    code, report = gate(here, "--sm", "cpu", "--part", "behaviour", "--part", "speed")
    (fixed,) = by_change(report, "fixed")
    assert fixed["baseline"]["kind"] == "nan"
    assert (code, report["verdict"]) == (0, "bump")
    (speed,) = report["machines"][0]["timings"]["speed"]
    assert speed["name"] == "subject.py:merge"
    assert all(0 < size < 1e9 for size in speed["measurements"][0]["peak_bytes"].values())


TIRING = """
import time
import flashinfer
from subject import merge as plain
from kernelproof.impl import implementation

calls, last = 0, None


@implementation("merge_state", name="subject")
def merge(inputs):
    global calls, last
    now = inputs.outs.double().sum().item(), inputs.outs.shape
    calls, last = calls + 1 if now == last else 0, now
    while flashinfer.SHIFT and calls > 9:
        time.sleep(0.01)
    return plain(inputs)
"""


def test_a_candidate_that_hangs_under_load_blocks(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("judging", "outcomes"):
        where = f"kernelproof.ci.bump.behaviour.{module}.DEADLINES"
        monkeypatch.setattr(where, Deadlines(run=1.0))
    (here / "tiring.py").write_text(TIRING)
    release(here / "old", OLD)
    release(here / "new", NEW, shift=True)
    asked = ["--sm", "cpu", "--part", "behaviour", "--law", "soak"]
    code, report = gate(here, *asked, "--implementation", "tiring.py:merge")
    (hang,) = by_change(report, "hang")
    assert (hang["subject"], hang["laws"]) == ("tiring.py:merge", ["soak"])
    assert (hang["action"], hang["candidate"]["status"]) == ("block", "HANG")
    assert (code, report["verdict"]) == (1, "do not bump")
    liveness = report["machines"][0]["liveness"]
    by_name = {each["name"]: each for each in liveness["soaked"]}
    assert by_name["tiring.py:merge"]["failed"] == len(liveness["hangs"]) > 0
    assert by_name["subject.py:merge"]["failed"] == 0
    assert liveness["launches"] == SOAK_ON_CPU


HUNGRY = """
import flashinfer
import torch
from subject import merge as plain
from kernelproof.impl import implementation


@implementation("merge_state", name="subject")
def merge(inputs):
    kept = torch.zeros(2 << 20 if flashinfer.SHIFT else 1, dtype=torch.uint8)
    out, lse = plain(inputs)
    return out + kept[0], lse
"""


def test_a_candidate_that_needs_more_memory_is_told(here: Path) -> None:
    (here / "hungry.py").write_text(HUNGRY)
    release(here / "old", OLD)
    release(here / "new", NEW, shift=True)
    asked = ["--sm", "cpu", "--part", "behaviour", "--part", "speed"]
    code, report = gate(here, *asked, "--implementation", "hungry.py:merge")
    (found,) = by_change(report, "more-memory")
    assert (found["subject"], found["action"]) == ("hungry.py:merge", "report")
    assert found["candidate"]["peak_bytes"] > found["baseline"]["peak_bytes"] + (1 << 20)
    assert code == 0


def test_a_case_that_cannot_be_written_is_told_with_the_report(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk was filled while the comparison ran."""

    def full(path: Path, text: str) -> None:
        if path.name.startswith("bump-"):
            raise OSError(28, "No space left on device")
        write_text(path, text)

    monkeypatch.setattr("kernelproof.properties.findings.files.write_text", full)
    release(here / "old", OLD)
    release(here / "new", NEW, broken=True)
    code, report = gate(here, "--sm", "cpu", "--part", "behaviour")
    assert (code, report["verdict"]) == (2, "do not bump")
    assert "cannot be written (No space left on device)" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize(("named", "sides", "code"), [(True, 2, 2), (False, 2, 3), (True, 1, 3)])
def test_what_fails_with_both_is_wrong_usage_where_it_was_named(
    named: bool, sides: int, code: int, tmp_path: Path
) -> None:
    errors = dict.fromkeys(SIDES[:sides], "in whatever words")
    compared = Compared("it", "gone:it", errors=errors, unimported=frozenset(errors))
    comparison = Comparison(dict.fromkeys(SIDES, "9.9.1"), (), compared=[compared])
    plan = BumpPlan((), "cpu", PROFILES["quick"], 0, Ledger(()), tmp_path, tmp_path, named=named)
    assert [each for _, each in unimported(comparison, plan)] == [code] * sides


RARELY_WRONG = """
import flashinfer
from subject import merge as plain
from kernelproof.impl import implementation


@implementation("merge_state", name="subject")
def merge(inputs):
    out, lse = plain(inputs)
    return (out + 1 if flashinfer.SHIFT and inputs.outs.shape[:2] == (5, 33) else out), lse
"""


def test_the_corpus_is_judged_first_with_both(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "rare.py").write_text(RARELY_WRONG)
    (here / "corpus").mkdir()
    for name, tokens in (("rare", 33), ("plain", 2)):
        problem = MergeProblem(num_states=5, num_tokens=tokens)
        case = {"law": "parity", "implementation": "rare.py:merge", "problem": problem.to_json()}
        (here / "corpus" / f"{name}.json").write_text(json.dumps(case))
    release(here / "old", OLD)
    release(here / "new", NEW, shift=True)
    arguments = ("--sm", "cpu", "--part", "behaviour", "--implementation", "rare.py:merge")
    assert gate(here, *arguments)[0] == 0  # drawing does not find it
    code, report = gate(here, *arguments, "--corpus", "corpus")
    assert (code, report["verdict"]) == (1, "do not bump")
    assert report["machines"][0]["corpus"] == {"replayed": 2, "of_ledger": 0}
    out = capsys.readouterr().out
    assert "2 stored cases replayed (0 of the ledger)" in out
    (failure,) = by_change(report, "new-failure")
    assert (failure["found_by"], failure["laws"]) == (["corpus"], ["parity"])
    assert (failure["problem"]["num_states"], failure["problem"]["num_tokens"]) == (5, 33)
    assert failure["replay"] == {
        side: f"kernelproof replay corpus/rare.json --release {given}"
        for side, given in (("baseline", "old"), ("candidate", "new"))
    }
    assert main(failure["replay"]["candidate"].split()[1:]) == 1
    assert gate(here, *arguments, "--corpus", "no")[0] == 2


def test_a_policy_decides(here: Path) -> None:
    release(here / "old", OLD)
    release(here / "new", NEW, added=", alpha")
    policy = here / "policy.toml"
    policy.write_text(
        '[[accept]]\nfinding = "surface/parameter-required/*"\nreason = "we pass it"\n'
        '[[accept]]\nfinding = "behaviour/*"\nreason = "stale"\n'
        '[actions]\nrelease-unknown = "report"\n'
    )
    arguments = ("--sm", "90", "--part", "surface", "--part", "declarations")
    assert gate(here, *arguments)[1]["verdict"] == "do not bump"
    code, report = gate(here, *arguments, "--policy", str(policy))
    assert (code, report["verdict"]) == (0, "bump")
    (accepted,) = by_change(report, "parameter-required")
    assert (accepted["action"], accepted["accepted"]) == ("report", "we pass it")
    assert report["policy"]["unused"] == ["behaviour/*"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[action]\n", "Object contains unknown field `action`"),
        (
            "[actions]\nnew-failures = 'block'\n",
            "Invalid value 'new-failures' - at `key` in `$.actions`; did you mean new-failure",
        ),
        (
            "[actions]\nnew-failure = 'ignore'\n",
            "Invalid value 'ignore' - at `$.actions['new-failure']`; known: block, condition",
        ),
        ("[limits]\nslower = 0.5\n", "Expected `float` > 1.0 - at `$.limits.slower`"),
        ("[[accept]]\nfinding = '*'\n", "missing required field `reason` - at `$.accept[0]`"),
        ("[chips]\nrequired = ['sm_9000']\n", "required[0]: 'sm_9000' is"),
        ("[chips]\nrequire = [90]\n", "unknown field `require` - at `$.chips`"),
        (
            "[[accept]]\nfinding = '*'\nreason = ' '\n",
            "with something in it - at `$.accept[0].reason`",
        ),
        ("nonsense", "not TOML"),
    ],
)
def test_a_wrong_policy_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    (here / "policy.toml").write_text(text)
    words = ["gate", "--baseline", "old", "--candidate", "new", "--policy", "policy.toml"]
    assert main(words) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_release_that_is_not_there_is_told_in_the_report(here: Path) -> None:
    release(here / "old", OLD)
    code, report = gate(here, "--sm", "cpu,90", "--part", "surface")
    assert code == report["exit_code"] == 2
    assert report["verdict"] == "undecided"
    assert "--candidate: new: is no version" in report["failures"][0]
    assert report["baseline"]["flashinfer"] == OLD
    assert {each["verdict"] for each in report["chips"]} == {"undecided"}


@pytest.mark.parametrize(("init", "told"), [
    ("raise ImportError('no libcudart')\n", "no libcudart"),
    ("import os\nos.kill(os.getpid(), 11)\n", "the process ended with signal 11 (Segmentation"),
    ("import os\nos._exit(7)\n", "the process ended with status 7"),
])  # fmt: skip
def test_a_candidate_that_does_not_import_is_a_finding(here: Path, init: str, told: str) -> None:
    release(here / "old", OLD)
    release(here / "new", NEW, init=init)
    code, report = gate(here, "--sm", "cpu,90")
    assert (code, report["verdict"]) == (1, "do not bump")
    (broken,) = by_change(report, "release-broken")
    assert told in broken["message"]
    not_tested = {each["what"] for each in report["machines"][0]["not_tested"]}
    parts = {"surface", "declarations", "binaries", "behaviour", "speed", "compile"}
    assert not_tested == parts


def test_a_candidate_that_hangs_on_import_is_a_finding(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernelproof.ci.bump.behaviour.steps.DECLARATION_SECONDS", 1.0)
    release(here / "new", NEW, init="import time\ntime.sleep(60)\n")
    release(here / "old", OLD, init="raise ImportError('both are broken')\n")
    code, report = gate(here, "--sm", "cpu", "--part", "surface")
    assert (code, report["verdict"]) == (1, "do not bump")
    (broken,) = by_change(report, "release-broken")
    assert "did not answer within 1 s" in broken["message"]
    assert "--baseline" in report["failures"][0]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--baseline", "old"], "the candidate is missing"),
        (["--candidate", "new"], "the baseline is missing"),
        (["x", "--baseline", "a", "--candidate", "b"], "'x' stands beside --baseline"),
        (["--sm", "90"], "No such option"),
        (["--baseline", "a", "--candidate", "b", "--gating"], "No such option"),
        (["--baseline", "a", "--candidate", "b", "--unit", "xqa"], "--unit goes with --compile"),
        (["--baseline", "a", "--candidate", "b", "--sm", "9000"], "--sm 9000"),
        (["--baseline", "a", "--candidate", "b", "--law", "no"], "--law: there is no law"),
        (["--baseline", "a", "--candidate", "b", "--implementation", "no"], "--implementation"),
    ],
)
def test_wrong_usage_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["gate", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_another_interpreter_brings_its_own_packages(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release(here / "old", OLD)
    monkeypatch.setenv("PYTHONPATH", str(release(here / "own", NEW)))
    found = releases.find_release(sys.executable)
    assert found.folder == here / "own"
    assert found.own_environment is False  # the very same interpreter
    with pytest.raises(releases.InterpreterError, match="is no Python interpreter"):
        releases.find_release("/bin/ls")


def test_a_replay_asks_for_what_other_machines_have(here: Path) -> None:
    elsewhere = release(here / "elsewhere", OLD)
    (here / "project").mkdir()
    os.chdir(here / "project")  # the fixture goes back
    for given, shared in (
        (str(elsewhere), OLD),
        (str(release(here / "own", "9.9.3+mine")), str(here / "own")),  # nobody else has it
        (str(release(here / "project" / "near", NEW)), "near"),
        (sys.executable, sys.executable),
    ):
        found = releases.Release(given, Path(given), sys.executable, ())
        assert found.shared == shared
    assert releases.Release("0.6.13", elsewhere, sys.executable, ()).shared == "0.6.13"


def test_what_compiles_no_more_is_a_condition_on_its_chip() -> None:
    cells = [
        ("fa2", 90, "compiled", "failed"),
        ("fa3", 90, "failed", "compiled"),
        ("xqa", 120, "compiled", "unjudged"),
        ("moe", 100, "compiled", "compiled"),
        ("mla", 103, "absent", "absent"),
    ]
    records = [
        {"side": side, "unit": unit, "sm": sm, "status": status, "message": "no template"}
        for unit, sm, *statuses in cells
        for side, status in zip(releases.SIDES, statuses, strict=True)
    ]
    lost, fixed = compile_findings(records)
    assert (lost.change, lost.subject, lost.chips) == ("compile-failed", "fa2", (90,))
    assert (fixed.change, fixed.subject) == ("compile-fixed", "fa3")
    assert compiled_chips(records) == {90, 100}


def test_compiling_without_a_compiler_is_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(here / "no"))
    release(here / "old", OLD)
    release(here / "new", NEW)
    code, report = gate(here, "--part", "surface", "--sm", "90", "--compile", "90")
    assert (code, report["verdict"]) == (3, "undecided")
    assert "--compile: there is no nvcc" in report["failures"][0]


def settled(report: dict[str, Any]) -> dict[str, Any]:
    """Leave out what depends on the clock."""
    findings = [each for each in report["findings"] if each["area"] != "speed"]
    machines = [
        {k: v for k, v in each.items() if k not in ("timings", "command")}
        for each in report["machines"]
    ]
    left_out = {"date": "", "command": "", "findings": findings, "machines": machines}
    return {**report, **left_out}


def questions(journal: bytes) -> set[str]:
    return {json.loads(line).get("question", "") for line in journal.splitlines()}


def test_a_journal_that_ends_anywhere_leads_to_the_same_report(
    here: Path, monkeypatch: pytest.MonkeyPatch, shared_workers: Callable[..., Any]
) -> None:
    monkeypatch.setattr(releases.Release, "workers", shared_workers)
    release(here / "old", OLD)
    release(here / "new", NEW, shift=True)  # a failure takes a fresh process each time
    arguments = ("--sm", "cpu", "--part", "behaviour", "--journal", str(here / "j.jsonl"))
    _, undisturbed = gate(here, *arguments)
    assert by_change(undisturbed, "bits-changed")
    whole = (here / "j.jsonl").read_bytes()
    draw = Random(0)  # noqa: S311  moments to be killed at
    for cut in [0, 1, len(whole) - 1, len(whole), *(draw.randrange(len(whole)) for _ in range(20))]:
        (here / "j.jsonl").write_bytes(whole[:cut])
        _, resumed = gate(here, *arguments, "--resume")
        assert settled(resumed) == settled(undisturbed), cut
        remembered = resumed["machines"][0]["timings"]["remembered"]
        assert remembered >= max(0, whole[:cut].count(b"\n") - 1), cut
        kept = {json.loads(line).get("question") for line in whole.splitlines()}
        again = {
            json.loads(line).get("question")
            for line in (here / "j.jsonl").read_bytes().splitlines()
        }
        assert kept == again, cut


def test_a_killed_gate_goes_on(here: Path) -> None:
    release(here / "old", OLD)
    release(here / "new", NEW, broken=True)
    words = [
        sys.executable, "-m", "kernelproof", "gate", "--baseline", "old", "--candidate", "new",
        "--profile", "quick", "--law", "parity", "--implementation", "subject.py:merge",
        "--part", "behaviour", "--jobs", "1", "--sm", "cpu",
    ]  # fmt: skip

    def run(*more: str, kill_after: float | None = None) -> None:
        with (here / "log").open("wb") as log:
            process = subprocess.Popen(
                [*words, *more], cwd=here, start_new_session=True, stdout=log, stderr=log
            )
        journal = here / ".kernelproof" / "gate" / "old-new-cpu.jsonl"
        if kill_after is not None:
            while process.poll() is None and (
                not journal.exists() or journal.read_bytes().count(b"\n") < kill_after
            ):
                time.sleep(0.01)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    run("--json", "whole.json")
    lines = (here / ".kernelproof" / "gate" / "old-new-cpu.jsonl").read_bytes().count(b"\n")
    run("--json", "none.json", kill_after=lines // 2)
    assert not (here / "none.json").exists()
    run("--json", "again.json", "--resume")
    whole, again = (json.loads((here / n).read_text()) for n in ("whole.json", "again.json"))
    assert settled(again) == settled(whole)
    assert again["machines"][0]["timings"]["remembered"] >= lines // 2 - 1


def test_a_journal_of_another_comparison_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release(here / "old", OLD)
    release(here / "new", NEW)
    part = ("--part", "surface", "--sm", "90", "--journal", "j.jsonl")
    gate(here, *part)
    words = ["gate", "--baseline", "old", "--candidate", "new", "--resume", *part]
    assert main([*words, "--seed", "3"]) == 2
    assert "is of another run: its profile is 'quick', not 'gate'" in capsys.readouterr().err
    (here / "j.jsonl").write_text("{}\n")
    assert main(words) == 2
    assert "is no journal" in capsys.readouterr().err


def test_what_is_kept_names_no_path_and_is_a_report(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release(here / "old", OLD)
    release(here / "new", NEW, broken=True)
    given = ["--baseline", str(here / "old"), "--candidate", str(here / "new")]
    _, report = gate(here, "--sm", "cpu,90", *given, "--evidence", "bump-kept.json")
    text = (here / "bump-kept.json").read_text()
    assert str(here) not in text
    kept = json.loads(text)
    assert [each["id"] for each in kept["findings"]] == [each["id"] for each in report["findings"]]
    capsys.readouterr()
    assert main(["merge", "bump-kept.json", "--html", "page.html"]) == 1
    assert "new-failure" in (here / "page.html").read_text()


def test_reports_of_several_chips_are_merged(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release(here / "old", OLD)
    release(here / "new", NEW, added=", alpha")
    for name, chips in (("a", "90"), ("b", "100,103")):
        gate(here, "--part", "surface", "--part", "declarations", "--sm", chips)
        (here / "report.json").rename(here / f"{name}.json")
    one = json.loads((here / "a.json").read_text())
    one["chips"][0]["evidence"] = "run"
    (here / "a.json").write_text(json.dumps(one))
    capsys.readouterr()
    assert main(["merge", "a.json", "b.json", "--json", "all.json", "--junit", "all.xml"]) == 1
    merged = json.loads((here / "all.json").read_text())
    assert {each["chip"]: each["evidence"] for each in merged["chips"]} == {
        90: "run",
        100: "declared",
        103: "declared",
    }
    assert merged["features"]["chips"] == [90, 100, 103]
    assert all(len(row["cells"]) == 3 for row in merged["features"]["rows"])
    assert len(by_change(merged, "parameter-required")) == 1
    assert len(merged["machines"]) == 2
    assert [each["chips"] for each in merged["not_tested"] if "chips" in each] == [[100, 103]]


OTHER = {
    "given": "other", "flashinfer": "9.9.3", "own_environment": False,
    "torch": None, "triton": None, "cuda": None,
    "artifacts": {}, "not_imported": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "kernelproof/bump/2"}, "its schema is 'kernelproof/bump/2'"),
        ({"findings": None}, "Expected `array`, got `null` - at `$.findings`"),
        (
            {"findings": [{"id": "x"}]},
            "'x': Object missing required field `area` - at `$.findings[0]`",
        ),
        (
            {"candidate": {"given": "other"}},
            "missing required field `flashinfer` - at `$.candidate`",
        ),
        ({"candidate": OTHER}, "its candidate is 9.9.3"),
    ],
)
def test_reports_that_do_not_go_together_are_refused(
    here: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    release(here / "old", OLD)
    release(here / "new", NEW)
    _, report = gate(here, "--part", "surface", "--sm", "90")
    (here / "other.json").write_text(json.dumps({**report, **change}))
    assert main(["merge", "report.json", "other.json"]) == 2
    assert said in capsys.readouterr().err
    assert main(["merge", "report.json", "none.json"]) == 2
    assert "none.json: cannot be read" in capsys.readouterr().err
